"""Run Megatron's own pretrain scripts, unmodified, with chunk graphs."""
