"""The context-parallel groups of one rank, one of each size."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.contexts.router_groups import RouterGroups

__all__ = ["ContextGroups", "HeldGroups", "capturing_banks", "groups_put_back"]

_ATTRIBUTES = (
    *("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type", "pg_collection"),
    "tp_cp_group",
)
"""Where attention modules and routers keep the group that they were last called with."""


class ContextGroups:
    """Process groups of this rank by size; neighbours in its world, which starts at a multiple.

    Args:
        world: global ranks that share a global batch, this one among them.
        groups: by size; None for the group of this rank alone. Callers close what they made.
        for_routers: the groups that routers count over, where tensor-parallel ranks share rows.

    Attributes:
        for_routers: see above.

    Raises:
        TopologyError: a group is not of the ranks that it is to be of.
    """

    def __init__(
        self,
        world: Sequence[int],
        groups: Mapping[int, Any],
        for_routers: RouterGroups | None = None,
    ) -> None:
        self.for_routers = for_routers
        self.world = tuple(world)
        self.rank = self.world.index(dist.get_rank())
        self._groups = {size: groups[size] for size in sorted(groups, reverse=True)}
        self._made: list[Any] = []
        self._holders: weakref.WeakSet[ChunkGraphs] = weakref.WeakSet()
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
        cls,
        worlds: Sequence[Sequence[int]],
        sizes: Sequence[int],
        backend: str | None = None,
        *,
        tensor_groups: Sequence[Sequence[int]] = (),
    ) -> ContextGroups:
        """Make the groups; all processes of the job call it together with the same arguments.

        Args:
            worlds: of every pipeline stage and tensor-parallel rank, the ranks that share a global
                batch.
            sizes: of the groups, each dividing the world.
            backend: of `torch.distributed`; None: the default one.
            tensor_groups: for a model with experts on several tensor-parallel ranks, those ranks,
                each in a world of its own; routers count tokens over them too.

        Raises:
            TopologyError: a size does not divide a world, this rank is in no world, or the
                tensor-parallel ranks do not stand at one place of their worlds.
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
        for_routers = None
        if tensor_groups:
            for_routers = RouterGroups.create(worlds, tensor_groups, sizes, backend)
        groups = cls(mine, {**own, **({1: None} if 1 in sizes else {})}, for_routers)
        groups._made = made
        return groups

    @classmethod
    def of_data_parallel(cls, sizes: Sequence[int], *, has_experts: bool = False) -> ContextGroups:
        """Make groups among Megatron's data- and context-parallel ranks; all processes call it.

        Args:
            sizes: of the groups.
            has_experts: whether the model has routers; on several tensor-parallel ranks they need
                further groups.

        Raises:
            TopologyError: a size does not divide the number of these ranks.
        """
        worlds, tensor_groups = _ranks_of_megatron()
        needs_more = has_experts and len(tensor_groups[0]) > 1
        return cls.create(worlds, sizes, tensor_groups=tensor_groups if needs_more else ())

    @classmethod
    def of_megatron(cls, sizes: Sequence[int], *, has_experts: bool = False) -> ContextGroups:
        """Those that Megatron-core makes with ``hybrid_context_parallel`` (no pipeline).

        Args:
            sizes: of the groups.
            has_experts: see `of_data_parallel`; Megatron makes no groups for routers, so these are
                made here, and all processes of the job call it.

        Raises:
            TopologyError: Megatron has no group of a size.
        """
        state = import_megatron("megatron.core.parallel_state")
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
        for_routers = None
        if has_experts:
            worlds, tensor_groups = _ranks_of_megatron()
            if len(tensor_groups[0]) > 1:
                for_routers = RouterGroups.create(worlds, tensor_groups, sizes)
        return cls(dist.get_process_group_ranks(world), groups, for_routers)

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

    def of_routers(self, group: Any) -> Any:
        """What routers count over in a microbatch of a context-parallel group; see `RouterGroups`.

        Args:
            group: one of these; None: of this rank alone.

        Returns:
            That group; None: the model's own.

        Raises:
            TopologyError: ``group`` is none of these, or they were made without groups of routers.
        """
        if group is None:
            return None
        size = next((s for s, own in self._groups.items() if own is group), None)
        if size is None or self.for_routers is None:
            why = "is none of" if size is None else "has no group of routers among"
            raise TopologyError(
                f"rank {dist.get_rank()}: the context-parallel group of the ranks "
                f"{dist.get_process_group_ranks(group)} {why} those that follow_groups was called "
                "with. Make all with ContextGroups.of_data_parallel(sizes, has_experts=True) (or "
                "of_megatron), and give the microbatches these."
            )
        return self.for_routers.of(size)

    def warm_up(self, device: torch.device) -> None:
        """Use every group once, largest first, in each of the ways that attention may.

        A communicator that is set up in a capture breaks it. All ranks of the world call it
        together, and with groups for routers all of their worlds.
        """
        for group in self._groups.values():
            if group is not None:
                _use(group, device)
        if self.for_routers is not None:
            self.for_routers.warm_up(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def hold(self, graphs: ChunkGraphs) -> None:
        """Do not close while there are graphs of these."""
        self._holders.add(graphs)

    def close(self) -> None:
        """Destroy the groups that `create` made, those of routers too.

        Raises:
            ConfigError: there are still graphs that hold collectives of them, for which NCCL would
                wait for ever.
        """
        if any(graphs.report is not None for graphs in self._holders):
            raise ConfigError(
                "Context-parallel groups were closed while there are chunk graphs that hold "
                "collectives of them, for which NCCL would wait for ever. Call detach() first, or "
                "release()."
            )
        if self.for_routers is not None:
            self.for_routers.close()
        while self._made:
            dist.destroy_process_group(self._made.pop())


def _ranks_of_megatron() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Every group of data- and context-parallel ranks, and every one of tensor-parallel ranks.

    All processes of the job call it together.
    """
    state = import_megatron("megatron.core.parallel_state")
    world = state.get_data_parallel_group(with_context_parallel=True)
    tensor = state.get_tensor_model_parallel_group()
    own = tuple(tuple(dist.get_process_group_ranks(group)) for group in (world, tensor))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    worlds, tensor_groups = (sorted(set(ranks)) for ranks in zip(*of_ranks, strict=True))
    return worlds, tensor_groups


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
    groups: ContextGroups, held: HeldGroups, device: torch.device, *, are_used_before: bool
) -> Iterator[None]:
    """Around a capture session: no communicator is set up in a capture, and groups are put back.

    Args:
        groups: of the banks.
        held: what attention holds of them.
        device: of this rank.
        are_used_before: whether the session runs every bank eagerly before it captures one. What
            that uses is used; the other ways to send would only take memory, some 0.5 GiB for each
            of the ways of each group (NCCL 2.28 on two H200).
    """
    if not are_used_before:
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
