"""Support the caches and scales of Transformer Engine's FP8."""
