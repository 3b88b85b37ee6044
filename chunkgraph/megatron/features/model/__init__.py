"""What Megatron keeps in Python for every model."""
