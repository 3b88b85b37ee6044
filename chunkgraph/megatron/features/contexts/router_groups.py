"""The groups that routers count tokens over: of context- and tensor-parallel ranks together.

With sequence parallelism the tensor-parallel ranks share out the rows of their layer, so that the
tokens of a microbatch are on all tensor-parallel ranks of all ranks that share it. Megatron has
such groups for the model's own context-parallel size alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.errors import TopologyError

__all__ = ["RouterGroups"]


class RouterGroups:
    """Process groups of this rank by context-parallel size, larger than 1.

    Args:
        groups: by size.
    """

    def __init__(self, groups: Mapping[int, Any]) -> None:
        self._groups = {size: groups[size] for size in sorted(groups, reverse=True)}
        self._made: list[Any] = []

    @classmethod
    def create(
        cls,
        worlds: Sequence[Sequence[int]],
        tensor_groups: Sequence[Sequence[int]],
        sizes: Sequence[int],
        backend: str | None = None,
    ) -> RouterGroups:
        """Make the groups; all processes of the job call it together with the same arguments.

        Args:
            worlds: see `ContextGroups.create`; each is divided by the sizes.
            tensor_groups: the ranks that share a model's tensors, each in a world of its own.
            sizes: context-parallel sizes.
            backend: of `torch.distributed`; None: the default one.

        Raises:
            TopologyError: tensor-parallel ranks do not stand at one place of their worlds.
        """
        own = {}
        for joined in _joined(worlds, tensor_groups):
            for size in sorted(set(sizes) - {1}, reverse=True):
                for first in range(0, len(joined), size):
                    ranks = [r for tensor in joined[first : first + size] for r in tensor]
                    group = dist.new_group(ranks, backend=backend)
                    if dist.get_rank() in ranks:
                        own[size] = group
        groups = cls(own)
        groups._made = list(own.values())
        return groups

    def of(self, size: int) -> Any:
        """The group of a context-parallel size; None for 1, whose group is the model's own."""
        return None if size == 1 else self._groups[size]

    def warm_up(self, device: torch.device) -> None:
        """Use every group once, largest first, as routers do."""
        for group in self._groups.values():
            dist.all_reduce(torch.ones(8, dtype=torch.int64, device=device), group=group)

    def close(self) -> None:
        """Destroy the groups that `create` made; `ContextGroups.close` does, and looks first."""
        while self._made:
            dist.destroy_process_group(self._made.pop())


def _joined(
    worlds: Sequence[Sequence[int]], tensor_groups: Sequence[Sequence[int]]
) -> list[list[tuple[int, ...]]]:
    """For every pipeline stage, the tensor-parallel ranks at each place of its worlds."""
    place = {rank: (w, i) for w, world in enumerate(worlds) for i, rank in enumerate(world)}
    found: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
    for ranks in sorted(tuple(group) for group in tensor_groups):
        if not place.keys() >= set(ranks):
            raise TopologyError(f"The tensor-parallel ranks {list(ranks)} are in no world.")
        of_worlds = tuple(place[rank][0] for rank in ranks)
        places = {place[rank][1] for rank in ranks}
        if len(places) > 1 or len(set(of_worlds)) < len(ranks):
            raise TopologyError(
                f"The tensor-parallel ranks {list(ranks)} do not stand at one place each of worlds "
                f"of their own: {[list(world) for world in worlds]}."
            )
        found.setdefault(of_worlds, {})[places.pop()] = ranks
    joined = []
    for of_worlds, by_place in found.items():
        if len(by_place) < len(worlds[of_worlds[0]]):
            raise TopologyError(
                f"Of the ranks {list(worlds[of_worlds[0]])} only some are in tensor_groups, and "
                "with other ranks than their neighbours. Give the groups of all ranks."
            )
        joined.append([by_place[i] for i in sorted(by_place)])
    return joined
