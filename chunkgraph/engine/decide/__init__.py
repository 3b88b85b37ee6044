"""Decide once per step, together on all ranks, whether it replays or runs eagerly."""
