"""Mamba layers next to attention."""
