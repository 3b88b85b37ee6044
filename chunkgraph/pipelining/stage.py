"""`GraphedStage`: a stage of torch.distributed.pipelining that replays its module."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from chunkgraph.engine import Chunk, ChunkGraphs, StepMode
from chunkgraph.engine.gradients import NUM_SOLE, use_count
from chunkgraph.engine.split import SPLIT, WeightBackwards
from chunkgraph.errors import ConfigError
from chunkgraph.pipelining.data_parallel import (
    casting_only,
    finish_backwards,
    gather,
    hold_gathered,
    reduce_gradients,
    reshard,
    unwrapped,
)

_META = torch.device("meta")
"""Where torch before 2.15 has a receive buffer that is not in use; torch 2.15 has None there."""
_OVERRIDDEN = ("forward_one_chunk", "forward_maybe_with_nosync", "backward_maybe_with_nosync")


class GraphedStage(PipelineStage):
    """A `PipelineStage` that a `GraphedSchedule` captures; it takes the same arguments.

    Without a `GraphedSchedule` it behaves like a `PipelineStage`, and training warns of that once.
    Evaluation and torch's shape inference call the module. Receive buffers exist from a receive to
    its use. Torch before 2.15 keeps a buffer for every microbatch, and on it the input gradient of
    the last step.

    Attributes:
        replays: The calls of the module's graphs in training steps; None without a
            `GraphedSchedule`.
    """

    replays: StageReplays | None = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return the receives of a microbatch's inputs."""
        _allocate(self.args_recv_info[fwd_chunk_id], self._new_buffer)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the receives of a microbatch's output gradients."""
        if self.has_backward:
            _allocate(self.grad_recv_info[bwd_chunk_id], self._new_buffer)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Take a microbatch's output gradients from the next stage, which is on this rank."""
        if any(grad is None for grad in next_stage_bwd_outputs):
            _allocate(self.grad_recv_info[mb_index], self._new_buffer)  # torch sets them to zero
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a microbatch, which takes its inputs from the buffers."""
        infos: Sequence[Any] = () if self.is_first else self.args_recv_info[fwd_chunk_id]
        unused = [_empty_on(_META, info.buffer) for info in infos]
        try:
            if self.replays is not None:
                for index, info in enumerate(infos):
                    info.buffer = self.replays.landed(index, info.buffer)
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            for info, buffer in zip(infos, unused, strict=True):
                if info.buffer is not None:  # torch 2.15 has taken it
                    info.buffer = buffer

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the backward of a microbatch, which takes its output gradients from the buffers."""
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _free(self.grad_recv_info.get(bwd_chunk_id, ()))
        return result

    def _new_buffer(self, unused: torch.Tensor) -> torch.Tensor:
        if self.replays is None:
            return _empty_on(self.device, unused)
        return self.replays.new_buffer(unused)

    def free_buffers(self) -> None:
        """Drop all buffers: torch allocates those of a new schedule before its first step."""
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            _free(infos)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or its graphs in a training step.

        Only `forward_one_chunk` calls this method; to infer shapes, torch calls the module.
        """
        if self.replays is None and self.has_backward:
            _warn_of_no_schedule()
        if self.replays is None or not (self.has_backward or self.replays.evaluates):
            return super().forward_maybe_with_nosync(*args, **kwargs)
        return self.replays.forward(args, kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward; the last one of a step also reduces gradients."""
        run = super().backward_maybe_with_nosync
        has_hooks = isinstance(self.submod, DistributedDataParallel)
        if self.replays is None or not (self.replays.is_replayed and has_hooks):
            return run(backward_type, bwd_kwargs, last_backward=last_backward)
        result = run(backward_type, bwd_kwargs, last_backward=False)
        if last_backward:
            reduce_gradients(self.submod)
        return result

    def start_gradient_reduction(self) -> None:
        """Start FSDP2's reduction of a step's gradients."""
        if self.replays is not None and self.replays.is_replayed:
            finish_backwards(self.submod)
        super().start_gradient_reduction()  # type: ignore[misc]  # in torch 2.15


@functools.cache  # once per process
def _warn_of_no_schedule() -> None:
    warnings.warn(
        "A GraphedStage trains eagerly, without graphs: no GraphedSchedule drives it. Make one by "
        "GraphedSchedule(stages, make_schedule, counts), and call its step().",
        stacklevel=3,
    )


def graphed(stage: object) -> GraphedStage:
    """Return the stage, ready for capture; a `PipelineStage` becomes a `GraphedStage`.

    Raises:
        ConfigError: The object is neither of the two, or this torch release has other stages.
    """
    missing = [name for name in _OVERRIDDEN if not hasattr(PipelineStage, name)]
    if missing:
        raise ConfigError(
            f"torch {torch.__version__} runs its stages differently: PipelineStage has no "
            f"{missing[0]}, which graphs replace. Use a release from 2.11 to 2.15."
        )
    if type(stage) is PipelineStage:
        stage.__class__ = GraphedStage
    if not isinstance(stage, GraphedStage):
        raise ConfigError(
            f"A stage is a {type(stage).__name__}. Pass GraphedStage(module, stage_index, ...), or "
            "a class derived from it; for a traced model GraphedStage(pipe.get_stage_module(i), i, "
            "...)."
        )
    return stage


class ReceiveMemory:
    """Memory of a rank's receive buffers, used again as soon as no other tensor is on it.

    NCCL records its stream on every buffer. The CUDA allocator therefore reuses a freed buffer only
    after the device has passed all transfers posted until then, and the host may be a step ahead.
    A receive need not wait for the device: its stream waits for the one that it is posted on, which
    has waited for the last receive into the buffer, and runs everything that reads it.
    """

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def empty_like(self, unused: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor like ``unused``, on a buffer that no other tensor uses."""
        layout = unused.shape, unused.stride(), unused.dtype
        fitting = (b for b in self.buffers if (b.shape, b.stride(), b.dtype) == layout)
        buffer = next(filter(_is_unused, fitting), None)
        if buffer is None:
            buffer = torch.empty_like(unused, device=device)
            self.buffers.append(buffer)
        return buffer.detach().requires_grad_(unused.requires_grad)

    def leave_used(self) -> None:
        """Leave buffers that are still referenced to who refers to them."""
        self.buffers = list(filter(_is_unused, self.buffers))

    def clear(self) -> None:
        """Leave all buffers to their users, if any."""
        self.buffers.clear()


def _is_unused(buffer: torch.Tensor) -> bool:
    return use_count(buffer.untyped_storage()._cdata) == NUM_SOLE


class StageReplays:
    """Turn the calls of one stage into those of a chunk.

    Args:
        stage: The rank's stage.
        memory: Memory of the rank's receives in replayed steps.
        is_split: Whether the schedule splits backwards.

    Attributes:
        chunk: The captured chunk.
        is_wrapped: Whether the module is in ``DistributedDataParallel``.
        is_plain: Whether the chunk is the module alone.
    """

    def __init__(self, stage: GraphedStage, memory: ReceiveMemory, *, is_split: bool) -> None:
        self._stage = stage
        self._memory = memory
        wrapper = stage.submod
        self._wrapper: Any = wrapper
        self.is_wrapped = isinstance(wrapper, DistributedDataParallel)
        self._sharded = wrapper if isinstance(wrapper, FSDPModule) else None
        self._graphs: ChunkGraphs | None = None
        self._index = 0
        label = f"stage {stage.stage_index}"
        self._module = unwrapped(wrapper, label)
        self.is_plain = not self.is_wrapped and self._sharded is None
        self.chunk = replace(
            Chunk.from_module(self._module, label, program=SPLIT if is_split else None),
            forward=self._module if self.is_plain else self._call,
            # When an output's gradient arrives, the next stage has received the output, and the
            # slot is not reused earlier. Outputs of the last stage belong to the caller.
            copies_outputs=None if stage.is_last else lambda *_args, **_kwargs: False,
        )

    def join(self, graphs: ChunkGraphs, weights: WeightBackwards, index: int) -> None:
        """Join a rank's graphs as chunk ``index``."""
        self._graphs, self._index = graphs, index
        builder: Any = self._stage.dw_builder
        owner = getattr(getattr(builder, "func", None), "__self__", None)
        is_of_user = builder is not None and not isinstance(owner, WeightBackwards)
        if self.chunk.program is SPLIT:
            if is_of_user:
                raise ConfigError(
                    f"{self.chunk.label} has a dw_builder. Leave it out: the weight gradients of a "
                    "captured stage have their own graph. A module that delays them itself (with "
                    "a method backward_dw) needs none."
                )
            builder = functools.partial(weights.runner, index)
        elif not is_of_user:
            builder = None  # or that of an earlier schedule
        self._builder = builder
        self.take_stage()

    def take_stage(self) -> None:
        """Take the stage, whose last step another `GraphedSchedule` may have run.

        Raises:
            ConfigError: Its module was replaced.
        """
        if self._stage.submod is not self._wrapper:
            raise ConfigError(
                f"{self.chunk.label}: submod is another module than the one that GraphedSchedule "
                "captures. Create a GraphedSchedule of the changed stage, on all ranks."
            )
        self._stage.replays, self._stage.dw_builder = self, self._builder

    @property
    def is_replayed(self) -> bool:
        """Return whether backwards are replays, which run no hooks that wait for gradients."""
        assert self._graphs is not None
        is_training = self._graphs.forward_only.current is None
        return is_training and self._graphs.mode is StepMode.REPLAY

    @property
    def evaluates(self) -> bool:
        """Return whether a forward may be replayed in an evaluation step."""
        assert self._graphs is not None
        return self._graphs.forward_only.takes_calls

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one training step. All ranks enter it together."""
        # Outputs of the last step would keep the rest of their blocks of memory from a capture.
        self._stage.clear_runtime_states()
        if self._sharded is not None:
            gather(self._sharded)
        try:
            yield
        except BaseException:
            self._memory.clear()  # receives may not have ended
            raise
        if self._sharded is not None:
            reshard(self._sharded)
        self._stage.free_buffers()
        self._memory.leave_used()

    def hold_parameters(self) -> None:
        """Point the module at the captured parameters, where torch has replaced them meanwhile."""
        if self._sharded is not None and self.is_replayed:
            hold_gathered(self._sharded)

    def new_buffer(self, unused: torch.Tensor) -> torch.Tensor:
        """Return memory for a receive, in a replayed step that of an earlier receive.

        In a replay only copies into slots read a buffer, on the stream of the receives. An eager
        step keeps buffers for its backwards, and user code may read them on other streams.
        """
        if self.is_replayed:
            return self._memory.empty_like(unused, self._stage.device)
        self._memory.clear()
        return _empty_on(self._stage.device, unused)

    def landed(self, index: int, received: torch.Tensor) -> torch.Tensor:
        """Copy a received input to where the next forward reads it.

        Torch keeps the inputs until the backward. Returned is the one on the slot's memory, so that
        the other can be freed; in an eager step, the received one.
        """
        assert self._graphs is not None
        static = self._graphs.reserve_input(self._index, index)
        if static is None or (static.shape, static.dtype) != (received.shape, received.dtype):
            return received  # the call refuses another shape
        with torch.no_grad():
            return static.copy_(received)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a microbatch in a training step."""
        assert self._graphs is not None
        self.hold_parameters()
        return self._graphs.call(self._index, args, kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or in an eager step its wrapper."""
        assert self._graphs is not None
        wrapper = self._wrapper
        if self._graphs.mode is StepMode.EAGER:
            with wrapper.no_sync() if self.is_wrapped else nullcontext():
                return wrapper(*args, **kwargs)
        if self._sharded is not None:
            with casting_only(self._sharded, self.chunk.label):
                return self._module(*args, **kwargs)
        return self._module(*args, **kwargs)


def _allocate(infos: Iterable[Any], new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Allocate the buffers that are not in use."""
    for info in infos:
        buffer = getattr(info, "buffer", None)  # the first stage's inputs have none
        if buffer is not None and buffer.is_meta:
            info.buffer = new(buffer)


def _free(infos: Iterable[Any]) -> None:
    """Drop the buffers; their users keep them."""
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if buffer is not None and not buffer.is_meta:
            info.buffer = _empty_on(_META, buffer)


def _empty_on(device: torch.device, buffer: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor like ``buffer`` on another device."""
    return torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)
