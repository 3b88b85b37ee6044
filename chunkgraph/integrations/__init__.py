"""Adapters of chunk graphs to training frameworks."""
