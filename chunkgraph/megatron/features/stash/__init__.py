"""Saved activations of experts in pages."""
