"""Support the state that Megatron keeps in Python for every model."""
