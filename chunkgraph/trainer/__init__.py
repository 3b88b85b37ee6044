"""The demonstration: a Megatron model trained by a configuration, compared with eager training."""
