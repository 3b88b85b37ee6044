"""A replayed microbatch: its slot, its node of autograd, its ranges in a profile."""
