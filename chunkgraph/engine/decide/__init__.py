"""Decide once for each step, alike on all ranks, whether it replays or runs eagerly."""
