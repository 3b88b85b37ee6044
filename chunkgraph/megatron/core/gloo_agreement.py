"""Agree on the host over gloo process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Gather", "Share"]


class Gather:
    """Gather one value of every rank on all ranks of a group, on the host.

    Args:
        group: A gloo group that this object owns; None for a single rank.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the group's order; every rank must call this."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Destroy the group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


class Share:
    """Broadcast one rank's value to all ranks of a group, on the host.

    Args:
        group: A gloo group that this object owns.
        source: The global rank whose value is broadcast.
    """

    def __init__(self, group: Any, source: int) -> None:
        self._group = group
        self._source = source

    def __call__(self, value: Any) -> Any:
        """Return the source's value; the arguments of the other ranks are ignored."""
        values = [value]
        dist.broadcast_object_list(values, self._source, self._group, torch.device("cpu"))
        return values[0]

    def close(self) -> None:
        """Destroy the group."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)
