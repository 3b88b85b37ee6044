"""Caches and scales of Transformer Engine's FP8."""
