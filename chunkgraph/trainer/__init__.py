"""The demonstration: train a Megatron model by a configuration, and compare with eager training."""
