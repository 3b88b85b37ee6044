"""Groups of context- and tensor-parallel ranks over which routers count tokens.

With sequence parallelism the tensor-parallel ranks split the rows of their layer, so the tokens of
a microbatch are on all tensor-parallel ranks of every context-parallel rank. Megatron has such
groups only for the model's own context-parallel size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from chunkgraph.errors import TopologyError

__all__ = ["RouterGroups"]


class RouterGroups:
    """This rank's process groups for routers, by context-parallel size above 1.

    Args:
        groups: process group by size. The caller keeps ownership.
    """

    def __init__(self, groups: Mapping[int, Any]) -> None:
        self._groups = {size: groups[size] for size in sorted(groups, reverse=True)}
        self._created: list[Any] = []

    @classmethod
    def create(
        cls,
        worlds: Sequence[Sequence[int]],
        tensor_groups: Sequence[Sequence[int]],
        sizes: Sequence[int],
        backend: str | None = None,
    ) -> RouterGroups:
        """Create the groups; all processes of the job call it together with the same arguments.

        Args:
            worlds: see `ContextGroups.create`; every size divides each world's size.
            tensor_groups: the ranks of every tensor-parallel group, each in a different world.
            sizes: the context-parallel sizes.
            backend: the backend of `torch.distributed`; None: the default one.

        Raises:
            TopologyError: the ranks of a tensor-parallel group have different places in their
                worlds, or share a world.
        """
        by_size = {}
        for stage in _stages(worlds, tensor_groups):
            for size in sorted(set(sizes) - {1}, reverse=True):
                for first in range(0, len(stage), size):
                    ranks = [r for tensor in stage[first : first + size] for r in tensor]
                    group = dist.new_group(ranks, backend=backend)
                    if dist.get_rank() in ranks:
                        by_size[size] = group
        groups = cls(by_size)
        groups._created = list(by_size.values())
        return groups

    def of(self, size: int) -> Any:
        """Return the group of a context-parallel size; None for 1: routers use the model's own."""
        return None if size == 1 else self._groups[size]

    def close(self) -> None:
        """Destroy the groups that `create` made; called by `ContextGroups.close`, which checks."""
        while self._created:
            dist.destroy_process_group(self._created.pop())


def _stages(
    worlds: Sequence[Sequence[int]], tensor_groups: Sequence[Sequence[int]]
) -> list[list[tuple[int, ...]]]:
    """Return, for every pipeline stage, the tensor-parallel ranks at each place of its worlds."""
    place = {rank: (w, i) for w, world in enumerate(worlds) for i, rank in enumerate(world)}
    by_worlds: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
    for ranks in sorted(tuple(group) for group in tensor_groups):
        if not place.keys() >= set(ranks):
            raise TopologyError(f"The tensor-parallel ranks {list(ranks)} are in no world.")
        world_numbers = tuple(place[rank][0] for rank in ranks)
        places = {place[rank][1] for rank in ranks}
        if len(places) > 1 or len(set(world_numbers)) < len(ranks):
            raise TopologyError(
                f"The tensor-parallel ranks {list(ranks)} must have the same place in different "
                f"worlds; the worlds are {[list(world) for world in worlds]}."
            )
        by_worlds.setdefault(world_numbers, {})[places.pop()] = ranks
    stages = []
    for world_numbers, by_place in by_worlds.items():
        if len(by_place) < len(worlds[world_numbers[0]]):
            raise TopologyError(
                f"tensor_groups has only some of the ranks {list(worlds[world_numbers[0]])}, or "
                "joins them with ranks of different worlds. Pass the tensor-parallel groups of "
                "all ranks."
            )
        stages.append([by_place[i] for i in sorted(by_place)])
    return stages
