"""The context-parallel groups of one rank, one group of each size."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.megatron.core.access import import_megatron

__all__ = ["ContextGroups", "HeldGroups"]

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

    Attributes:
        world: as passed.
        rank: this rank's index in ``world``.

    Raises:
        TopologyError: a group does not consist of these neighbours.
    """

    def __init__(self, world: Sequence[int], groups: Mapping[int, Any]) -> None:
        self.world = tuple(world)
        self.rank = self.world.index(dist.get_rank())
        self._groups = {size: groups[size] for size in sorted(groups, reverse=True)}
        self._created: list[Any] = []
        self._holders: weakref.WeakSet[ChunkGraphs] = weakref.WeakSet()
        for size, group in self._groups.items():
            if group is None and size == 1:
                continue
            first = self.rank // size * size
            neighbours = list(self.world[first : first + size])
            ranks = [] if group is None else dist.get_process_group_ranks(group)
            if ranks != neighbours:
                raise TopologyError(
                    f"rank {dist.get_rank()}: the context-parallel group of size {size} has the "
                    f"ranks {ranks}, not {neighbours}."
                )

    @classmethod
    def create(
        cls,
        worlds: Sequence[Sequence[int]],
        sizes: Sequence[int],
        backend: str | None = None,
    ) -> ContextGroups:
        """Create the groups; all processes of the job call it together with the same arguments.

        Args:
            worlds: for every pipeline stage and tensor-parallel rank, the ranks that share a global
                batch.
            sizes: the group sizes; each divides the world's size.
            backend: the backend of `torch.distributed`; None: the default one.

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
                    group = dist.new_group(ranks, backend=backend)
                    if dist.get_rank() in ranks:
                        by_size[size] = group
                        created.append(group)
        if own_world is None:
            raise TopologyError(f"rank {dist.get_rank()} is in none of the worlds.")
        groups = cls(own_world, {**by_size, **({1: None} if 1 in sizes else {})})
        groups._created = created
        return groups

    @classmethod
    def of_data_parallel(cls, sizes: Sequence[int]) -> ContextGroups:
        """Create groups of Megatron's data- and context-parallel ranks; all processes call it.

        Args:
            sizes: the group sizes.

        Raises:
            TopologyError: a size does not divide the number of these ranks.
        """
        state = import_megatron("megatron.core.parallel_state")
        world = state.get_data_parallel_group(with_context_parallel=True)
        worlds: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(worlds, tuple(dist.get_process_group_ranks(world)))
        return cls.create(sorted(set(worlds)), sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the group sizes, largest first."""
        return tuple(self._groups)

    def of(self, size: int) -> Any:
        """Return the group of a size; None for this rank alone.

        Raises:
            TopologyError: there is no group of this size.
        """
        if size not in self._groups:
            raise TopologyError(f"There is no context-parallel group of {size}: {self.sizes}.")
        return self._groups[size]

    def hold(self, graphs: ChunkGraphs) -> None:
        """Refuse to close while this engine has graphs."""
        self._holders.add(graphs)

    def close(self) -> None:
        """Destroy the groups that `create` made.

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


class HeldGroups:
    """The context-parallel groups that modules keep in attributes.

    Eager steps look at all modules, since attention may get the attributes in any call. A replay
    calls no module, so it looks only at those that held a group before the capture.

    Args:
        modules: the modules; their submodules are included.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self._holders: list[nn.Module] | None = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Restore the groups after a capture session, and record which modules held one before.

        Transformer Engine's attention keeps the group of its last call, here the last bank's.
        """
        modules = _submodules(self.modules)
        self._holders = [m for m in modules if vars(m).keys() & set(_ATTRIBUTES)]
        with _put_back(modules):
            yield

    @contextmanager
    def put_back(self, *, is_replayed: bool) -> Iterator[None]:
        """Restore, on exit, the groups that the modules have on entry."""
        holders = self._holders if is_replayed else None
        with _put_back(_submodules(self.modules) if holders is None else holders):
            yield


def _submodules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules and all their submodules, each once."""
    return list({id(m): m for module in modules for m in module.modules()}.values())


@contextmanager
def _put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    attributes = [
        (module, {name: vars(module)[name] for name in _ATTRIBUTES if name in vars(module)})
        for module in modules
    ]
    try:
        yield
    finally:
        for module, values in attributes:
            for name in _ATTRIBUTES:
                if name in vars(module) and name not in values:
                    delattr(module, name)
            vars(module).update(values)
