"""Where this rank stands in Megatron's pipeline, and how all ranks agree on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.errors import ConfigError
from chunkgraph.megatron import compat
from chunkgraph.schedules import stage_of
from chunkgraph.slots import plan_slots

__all__ = [
    "Gather",
    "Maximum",
    "PipelinePlace",
    "Share",
    "agree_by_maximum",
    "expert_ranks",
    "gather_from_data_ranks",
    "ranks_of_other_nodes",
    "share_in_tensor_group",
    "uses_gloo",
]

_CLOSING_TIME = timedelta(seconds=2)


@dataclass(frozen=True)
class PipelinePlace:
    """This rank's place in the pipeline.

    Attributes:
        rank: global rank.
        pipeline_rank: rank in the pipeline-parallel group.
        pipeline_size: ranks of that group.
        num_chunks: model chunks on this rank.
        group_size: microbatches that pass a chunk before the next chunk's turn.
    """

    rank: int
    pipeline_rank: int
    pipeline_size: int
    num_chunks: int
    group_size: int

    @classmethod
    def current(cls, num_chunks: int, config: Any) -> PipelinePlace:
        """Read Megatron's parallel state.

        Raises:
            ConfigError: the model parallel groups are not set up.
        """
        state = compat.import_megatron("megatron.core.parallel_state")
        if not state.model_parallel_is_initialized():
            raise ConfigError(
                "Megatron's model parallel groups are not set up. Call "
                "parallel_state.initialize_model_parallel() before attach()."
            )
        size = state.get_pipeline_model_parallel_world_size()
        return cls(
            rank=dist.get_rank(),
            pipeline_rank=state.get_pipeline_model_parallel_rank(),
            pipeline_size=size,
            num_chunks=num_chunks,
            group_size=getattr(config, "microbatch_group_size_per_vp_stage", None) or size,
        )

    def stage(self, chunk: int) -> int:
        """The global stage that is a chunk of this rank."""
        return stage_of(self.pipeline_rank, chunk, self.pipeline_size)

    def label(self, chunk: int) -> str:
        """Names a chunk of this rank in errors."""
        return f"rank {self.rank}, pipeline stage {self.stage(chunk)}, chunk {chunk}"

    def num_slots(self, *, are_shared: bool = False) -> tuple[int, ...]:
        """Slots of each chunk that are enough for any number of microbatches.

        Args:
            are_shared: whether all chunks share them.
        """
        plan = plan_slots(
            self.pipeline_size, self.num_chunks, self.group_size, rank=self.pipeline_rank
        )
        if are_shared:
            return (plan.peak_in_flight,) * self.num_chunks
        return plan.slots_per_chunk


def agree_by_maximum() -> Maximum | None:
    """Element-wise maximum over all ranks, on the host; None for a single process.

    Makes a gloo group of its own, so every rank must call it in the same order as its other
    process groups; without gloo (see `uses_gloo`) it takes keys of the job's store.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if uses_gloo():
        return Maximum(dist.new_group(backend="gloo"))
    from chunkgraph.megatron.store_agreement import StoreMaximum

    return StoreMaximum(dist.get_world_size())


def uses_gloo() -> bool:
    """Whether Megatron may make process groups of gloo, as without ``--disable-gloo-...``."""
    state = compat.import_megatron("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        return True
    try:
        return state.get_data_parallel_group_gloo() is not None
    except AssertionError:
        return False


def expert_ranks() -> list[int]:
    """The ranks that share this rank's experts; none where no groups are set up."""
    state = compat.import_megatron("megatron.core.parallel_state")
    if not (dist.is_initialized() and state.model_parallel_is_initialized()):
        return []
    return dist.get_process_group_ranks(state.get_expert_model_parallel_group())


def ranks_of_other_nodes(
    ranks: Sequence[int], rank: int, environment: Mapping[str, str]
) -> list[int]:
    """Those of some ranks that were not started on the node of ``rank``.

    Args:
        ranks: global ones.
        rank: of this process.
        environment: LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them, which numbers the ranks
            of a node one after the other; where they are missing, no rank is found.
    """
    local = [environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(number.isdecimal() for number in local):
        return []
    place, size = map(int, local)
    first = rank - place
    return [r for r in ranks if not first <= r < first + size]


def share_in_tensor_group() -> Share | None:
    """How the first of the tensor-parallel ranks tells the others; None where it is alone.

    Makes a gloo group of its own, in which every tensor-parallel rank has to take part; without
    gloo it takes keys of the job's store.
    """
    state = compat.import_megatron("megatron.core.parallel_state")
    ranks = dist.get_process_group_ranks(state.get_tensor_model_parallel_group())
    if len(ranks) == 1:
        return None
    if uses_gloo():
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return Share(group, ranks[0])
    from chunkgraph.megatron.store_agreement import StoreShare

    return StoreShare(ranks)


def gather_from_data_ranks() -> Gather:
    """How the ranks that share a global batch tell each other, on the host.

    Makes a gloo group of its own where there are several, in which all of them have to take part;
    without gloo it takes keys of the job's store.
    """
    state = compat.import_megatron("megatron.core.parallel_state")
    group = state.get_data_parallel_group(with_context_parallel=True)
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return Gather(None)
    if uses_gloo():
        return Gather(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
    from chunkgraph.megatron.store_agreement import StoreGather

    return StoreGather(ranks)


class Gather:
    """Gives every rank's value to all ranks of a group, on the host.

    Args:
        group: a gloo group of its own; None for this rank alone.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, value: Any) -> list[Any]:
        """The values of all, in the order of the group; every rank of it calls."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


class Share:
    """Gives one rank's value to all ranks of a group, on the host.

    Args:
        group: a gloo group of its own.
        source: the global rank whose value it is.
    """

    def __init__(self, group: Any, source: int) -> None:
        self._group = group
        self._source = source

    def __call__(self, value: Any) -> Any:
        """The source's value; what the others give is not looked at."""
        values = [value]
        dist.broadcast_object_list(values, self._source, self._group, torch.device("cpu"))
        return values[0]

    def close(self) -> None:
        """Give the group back."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


class Maximum:
    """An `EarlyAgree` over a process group of its own.

    Args:
        group: a gloo group of all ranks.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._last: Any = None

    def __call__(self, values: Sequence[int]) -> list[int]:
        """Ask and wait."""
        return self.start(values)()

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Ask; the result waits for the answer."""
        tensor = torch.tensor(list(values), dtype=torch.int64, device=torch.device("cpu"))
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._last = work

        def wait() -> list[int]:
            work.wait()
            return [int(value) for value in tensor]

        return wait

    def close(self) -> None:
        """Give the group back; nothing can be asked any more.

        Every step asks about the next one, so that a question is open when training ends. All
        ranks asked it, unless one of them failed; then the group is left to the process's end.
        """
        group, self._group = self._group, None
        if group is None or not dist.is_initialized():
            return
        if self._last is not None:
            try:
                self._last.wait(_CLOSING_TIME)
            except RuntimeError:
                return
        dist.destroy_process_group(group)
