"""Replay or eager: decided once for each step, alike on all ranks."""
