"""Support parameters that Megatron-FSDP shards."""
