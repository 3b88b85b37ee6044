"""The context-parallel groups of one rank, one group of each size."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.engine.agreement import new_group
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.megatron.core.access import import_megatron

_ATTRIBUTES = (
    *("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type", "pg_collection"),
    "tp_cp_group",
)
"""Attributes in which attention modules and routers keep the group of their last call."""


class ContextGroups:
    """This rank's process groups by size.

    A group of size C consists of C neighbours in the world, beginning at a multiple of C.

    Args:
        world: the global ranks that share a global batch, including this one.
        groups: process group by size; None for this rank alone. The caller keeps ownership.
        for_routers: the groups that routers count over by size above 1, where tensor-parallel ranks
            share rows. The caller keeps ownership.

    Attributes:
        for_routers: as passed.
        world: as passed.
        rank: this rank's index in ``world``.
    """

    def __init__(
        self,
        world: Sequence[int],
        groups: Mapping[int, Any],
        for_routers: Mapping[int, Any] | None = None,
    ) -> None:
        self.for_routers = for_routers
        self.world = tuple(world)
        self.rank = self.world.index(dist.get_rank())
        self._groups = {size: groups[size] for size in sorted(groups, reverse=True)}
        self._created: list[Any] = []
        self._holders: weakref.WeakSet[ChunkGraphs] = weakref.WeakSet()

    @classmethod
    def create(
        cls,
        worlds: Sequence[Sequence[int]],
        sizes: Sequence[int],
        *,
        tensor_groups: Sequence[Sequence[int]] = (),
    ) -> ContextGroups:
        """Create the groups; all processes of the job call it together with the same arguments.

        Args:
            worlds: for every pipeline stage and tensor-parallel rank, the ranks that share a global
                batch.
            sizes: the group sizes; each divides the world's size.
            tensor_groups: for a model with experts on several tensor-parallel ranks, the ranks of
                every tensor-parallel group, each at the same place of a different world; routers
                count tokens over them too.

        Raises:
            TopologyError: a size does not divide a world, or this rank is in no world.
        """
        by_size, own_world = {}, None
        created = []
        for world in worlds:
            if dist.get_rank() in world:
                own_world = world
            for size in sorted(set(sizes), reverse=True):
                if len(world) % size:
                    raise TopologyError(
                        f"{len(world)} ranks cannot be divided into groups of {size}."
                    )
                if size == 1:
                    continue
                for first in range(0, len(world), size):
                    ranks = list(world[first : first + size])
                    group = new_group(ranks)
                    if dist.get_rank() in ranks:
                        by_size[size] = group
                        created.append(group)
        if own_world is None:
            raise TopologyError(f"rank {dist.get_rank()} is in none of the worlds.")
        for_routers: dict[int, Any] = {}
        tensor_ranks = {rank: ranks for ranks in tensor_groups for rank in ranks}
        for size in sorted(set(sizes) - {1}, reverse=True) if tensor_groups else ():
            # The worlds of a pipeline stage have the same tensor-parallel groups.
            unions = {
                tuple(r for rank in world[first : first + size] for r in tensor_ranks[rank])
                for world in worlds
                for first in range(0, len(world), size)
            }
            for union in sorted(unions):
                group = new_group(list(union))
                if dist.get_rank() in union:
                    for_routers[size] = group
                    created.append(group)
        groups = cls(
            own_world,
            {**by_size, **({1: None} if 1 in sizes else {})},
            for_routers if tensor_groups else None,
        )
        groups._created = created
        return groups

    @classmethod
    def of_data_parallel(cls, sizes: Sequence[int], *, has_experts: bool = False) -> ContextGroups:
        """Create groups of Megatron's data- and context-parallel ranks; all processes call it.

        Args:
            sizes: the group sizes.
            has_experts: whether the model has routers, which need more groups if there are several
                tensor-parallel ranks.

        Raises:
            TopologyError: a size does not divide the number of these ranks.
        """
        worlds, tensor_groups = _ranks_of_megatron()
        needs_more = has_experts and len(tensor_groups[0]) > 1
        return cls.create(worlds, sizes, tensor_groups=tensor_groups if needs_more else ())

    def of(self, size: int) -> Any:
        """Return the group of a size; None for this rank alone.

        Raises:
            TopologyError: there is no group of this size.
        """
        if size not in self._groups:
            raise TopologyError(f"There is no context-parallel group of {size}: {[*self._groups]}.")
        return self._groups[size]

    def of_routers(self, group: Any) -> Any:
        """Return the group over which routers count tokens of a microbatch.

        Args:
            group: the microbatch's context-parallel group, one of these; None: this rank alone.

        Returns:
            The group; None: the model's own.

        Raises:
            TopologyError: ``group`` is not one of these, or they have no groups for routers.
        """
        if group is None:
            return None
        size = next((s for s, member in self._groups.items() if member is group), None)
        if size is None or self.for_routers is None:
            why = "is none of" if size is None else "has no group of routers among"
            raise TopologyError(
                f"rank {dist.get_rank()}: the context-parallel group of the ranks "
                f"{dist.get_process_group_ranks(group)} {why} those that follow_groups was called "
                "with. Make all groups with ContextGroups.of_data_parallel(sizes, "
                "has_experts=True), and use them for the microbatches."
            )
        return None if size == 1 else self.for_routers[size]

    def hold(self, graphs: ChunkGraphs) -> None:
        """Refuse to close while this engine has graphs."""
        self._holders.add(graphs)

    def close(self) -> None:
        """Destroy the groups that `create` made, including those for routers.

        Raises:
            ConfigError: graphs still hold collectives of them; NCCL would wait for these forever.
        """
        if any(graphs.report is not None for graphs in self._holders):
            raise ConfigError(
                "Context-parallel groups were closed while chunk graphs hold collectives of them, "
                "for which NCCL would wait forever. Call detach() or release() first."
            )
        while self._created:
            dist.destroy_process_group(self._created.pop())


def _ranks_of_megatron() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the ranks of every data- and context-parallel group, and of every tensor-parallel one.

    All processes of the job call it together.
    """
    state = import_megatron("megatron.core.parallel_state")
    world = state.get_data_parallel_group(with_context_parallel=True)
    tensor = state.get_tensor_model_parallel_group()
    own_ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in (world, tensor))
    ranks_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks_by_rank, own_ranks)
    worlds, tensor_groups = (sorted(set(ranks)) for ranks in zip(*ranks_by_rank, strict=True))
    return worlds, tensor_groups


@contextmanager
def groups_put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore, on exit, the groups that modules and their submodules keep in attributes on entry.

    Transformer Engine's attention keeps the group of its last call, in a capture the last bank's.
    Attention may get the attributes in any call.
    """
    every = {id(m): m for module in modules for m in module.modules()}.values()
    attributes = [
        (module, {name: vars(module)[name] for name in _ATTRIBUTES if name in vars(module)})
        for module in every
    ]
    try:
        yield
    finally:
        for module, values in attributes:
            for name in _ATTRIBUTES:
                if name in vars(module) and name not in values:
                    delattr(module, name)
            vars(module).update(values)
