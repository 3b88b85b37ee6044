"""The context-parallel groups of one rank, one of each size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chunkgraph.errors import TopologyError
from chunkgraph.megatron import compat

__all__ = ["ContextGroups", "HeldGroups", "capturing_banks", "groups_put_back"]

_ATTRIBUTES = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type", "pg_collection")
"""Where attention modules keep the group that they were last called with."""


class ContextGroups:
    """Process groups of this rank by size; neighbours in its world, which starts at a multiple.

    Args:
        world: global ranks that share a global batch, this one among them.
        groups: by size; None for the group of this rank alone. Callers close what they made.

    Raises:
        TopologyError: a group is not of the ranks that it is to be of.
    """

    def __init__(self, world: Sequence[int], groups: Mapping[int, Any]) -> None:
        self.world = tuple(world)
        self.rank = self.world.index(dist.get_rank())
        self._groups = {size: groups[size] for size in sorted(groups, reverse=True)}
        self._made: list[Any] = []
        for size, group in self._groups.items():
            if group is None and size == 1:
                continue
            first = self.rank // size * size
            wanted = list(self.world[first : first + size])
            found = [] if group is None else dist.get_process_group_ranks(group)
            if found != wanted:
                raise TopologyError(
                    f"rank {dist.get_rank()}: the context-parallel group of size {size} has the "
                    f"ranks {found}, not {wanted}."
                )

    @classmethod
    def create(
        cls, worlds: Sequence[Sequence[int]], sizes: Sequence[int], backend: str | None = None
    ) -> ContextGroups:
        """Make the groups; all processes of the job call it together with the same arguments.

        Args:
            worlds: of every pipeline stage and tensor-parallel rank, the ranks that share a global
                batch.
            sizes: of the groups, each dividing the world.
            backend: of `torch.distributed`; None: the default one.

        Raises:
            TopologyError: a size does not divide a world, or this rank is in no world.
        """
        own, mine = {}, None
        made = []
        for world in worlds:
            if dist.get_rank() in world:
                mine = world
            for size in sorted(set(sizes), reverse=True):
                if len(world) % size:
                    raise TopologyError(f"{len(world)} ranks do not divide in groups of {size}.")
                if size == 1:
                    continue
                for first in range(0, len(world), size):
                    ranks = list(world[first : first + size])
                    group = dist.new_group(ranks, backend=backend)
                    if dist.get_rank() in ranks:
                        own[size] = group
                        made.append(group)
        if mine is None:
            raise TopologyError(f"rank {dist.get_rank()} is in none of the worlds.")
        groups = cls(mine, {**own, **({1: None} if 1 in sizes else {})})
        groups._made = made
        return groups

    @classmethod
    def of_data_parallel(cls, sizes: Sequence[int]) -> ContextGroups:
        """Make groups among Megatron's data- and context-parallel ranks; all processes call it.

        Raises:
            TopologyError: a size does not divide the number of these ranks.
        """
        state = compat.import_megatron("megatron.core.parallel_state")
        own = dist.get_process_group_ranks(
            state.get_data_parallel_group(with_context_parallel=True)
        )
        worlds: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(worlds, tuple(own))
        return cls.create(sorted(set(worlds)), sizes)

    @classmethod
    def of_megatron(cls, sizes: Sequence[int]) -> ContextGroups:
        """Those that Megatron-core makes with ``hybrid_context_parallel`` (0.17 on, no pipeline).

        Raises:
            TopologyError: Megatron has no group of a size.
        """
        state = compat.import_megatron("megatron.core.parallel_state")
        get = getattr(state, "get_hybrid_data_context_parallel_groups", None)
        world = state.get_data_parallel_group(with_context_parallel=True)
        groups: dict[int, Any] = {}
        for size in sizes:
            try:
                groups[size] = None if size == 1 else get and get(group_size=size)
            except (AssertionError, KeyError):
                groups[size] = None
            if size > 1 and groups[size] is None:
                raise TopologyError(
                    f"Megatron has no context-parallel group of {size} ranks. Call "
                    "initialize_model_parallel(hybrid_context_parallel=True), or use "
                    "ContextGroups.create()."
                )
        return cls(dist.get_process_group_ranks(world), groups)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of all groups, largest first."""
        return tuple(self._groups)

    def of(self, size: int) -> Any:
        """The group of a size, None for this rank alone.

        Raises:
            TopologyError: there is none.
        """
        if size not in self._groups:
            raise TopologyError(f"There is no context-parallel group of {size}: {self.sizes}.")
        return self._groups[size]

    def warm_up(self, device: torch.device) -> None:
        """Use every group once, largest first, in each of the ways that attention may.

        A communicator that is set up in a capture breaks it. All ranks of the world call it
        together.
        """
        for group in self._groups.values():
            if group is not None:
                _use(group, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """Destroy the groups that `create` made. The graphs that hold them must be gone."""
        while self._made:
            dist.destroy_process_group(self._made.pop())


def _use(group: Any, device: torch.device) -> None:
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    value = torch.ones(len(ranks), device=device)
    dist.all_reduce(value, group=group)
    dist.all_gather([torch.empty_like(value) for _ in ranks], value, group=group)
    received = torch.empty_like(value)
    ring = [
        dist.P2POp(dist.isend, value, ranks[(place + 1) % len(ranks)], group),
        dist.P2POp(dist.irecv, received, ranks[place - 1], group),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    # One by one they may use another communicator, between each two neighbours.
    peers = (ranks[(place + 1) % len(ranks)], ranks[place - 1])
    if place % 2 == 0:
        started = [dist.isend(value, peers[0], group), dist.irecv(received, peers[1], group)]
    else:
        started = [dist.irecv(received, peers[1], group), dist.isend(value, peers[0], group)]
    for request in started:
        assert request is not None
        request.wait()
    if dist.get_backend(group) == "nccl":
        dist.all_to_all_single(received, value, group=group)


class HeldGroups:
    """The context-parallel groups that modules keep, with a list of those that do.

    Eager steps look at all modules, since attention may get the attributes in any call. A replay
    calls none, so that the list of those that held a group before the capture will do.

    Args:
        modules: with all that are in them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
        self._holding: list[nn.Module] | None = None

    def find(self) -> None:
        """Make the list."""
        self._holding = [m for m in _every(self.modules) if vars(m).keys() & set(_ATTRIBUTES)]

    @contextmanager
    def put_back(self, *, is_replayed: bool) -> Iterator[None]:
        """Give the modules, at the end of a step, the group that they have now."""
        known = self._holding if is_replayed else None
        with _put_back(_every(self.modules) if known is None else known):
            yield


@contextmanager
def capturing_banks(
    groups: ContextGroups, held: HeldGroups, device: torch.device
) -> Iterator[None]:
    """Around a capture session: communicators are used before it, and groups are put back."""
    groups.warm_up(device)
    held.find()
    with groups_put_back(held.modules):
        yield


@contextmanager
def groups_put_back(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give every module, at the end, the context-parallel group that it has now.

    Attention of Transformer Engine keeps the group of its last call, which in a capture session is
    that of the last bank.
    """
    with _put_back(_every(modules)):
        yield


def _every(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules and all that are in them, once each."""
    return list({id(m): m for module in modules for m in module.modules()}.values())


@contextmanager
def _put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    before = [
        (module, {name: vars(module)[name] for name in _ATTRIBUTES if name in vars(module)})
        for module in modules
    ]
    try:
        yield
    finally:
        for module, values in before:
            for name in _ATTRIBUTES:
                if name in vars(module) and name not in values:
                    delattr(module, name)
            vars(module).update(values)
