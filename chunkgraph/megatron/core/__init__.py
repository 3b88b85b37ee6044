"""Private names of Megatron that every model needs, each patch with its way back."""
