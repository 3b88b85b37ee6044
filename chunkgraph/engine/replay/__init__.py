"""Replay microbatches: slots, autograd nodes, and ranges in a profile."""
