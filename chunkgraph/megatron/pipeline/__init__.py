"""Pipeline schedules, as values, that drive an unmodified Megatron-core model."""
