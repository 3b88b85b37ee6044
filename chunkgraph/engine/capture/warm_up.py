"""Run eager passes before a capture session, and measure the memory that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from chunkgraph.engine.capture.gradients import GradientSinks
from chunkgraph.engine.capture.preserved import tensors_kept
from chunkgraph.engine.capture.slot_capture import refuse_undeclared
from chunkgraph.engine.capture.static_inputs import call_with, static_like
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.signature import Call, flatten
from chunkgraph.engine.split.delayed import DelayedModules
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import DrawOffsets, GraphBackend, OperatorTrace, watch_operators
from chunkgraph.graphs.operator_mode import OperatorMode

__all__ = ["WarmUp", "check_memory", "warm_up"]


@dataclass(frozen=True)
class WarmUp:
    """Measurements of a chunk's eager passes.

    Attributes:
        held_bytes: bytes that one forward holds until its backward; 0 without a pass, or if the
            backend does not count.
        block_bytes: size of the block that a slot's pool reserves: the most that the forward has
            in the pool at once, as far as a block can be divided. Excludes inputs and allocations
            that stay after a first pass.
        trace: trace of the forward's operators, if the memory plan needs it.
        offsets: where the forward saved random states; None without a pass.
    """

    held_bytes: int
    block_bytes: int
    trace: OperatorTrace | None
    offsets: DrawOffsets | None


def warm_up(
    chunk: Chunk,
    sample: Call,
    sinks: GradientSinks,
    leaves: Sequence[nn.Parameter],
    backend: GraphBackend,
    generators: Sequence[torch.Generator],
    *,
    num_passes: int,
    traces: bool,
) -> WarmUp:
    """Run eager passes on the capture stream, where libraries create handles and tune.

    Restores the chunk's tensors.

    Args:
        chunk: the chunk to run forward and backward.
        sample: its arguments; the values are copied.
        sinks: its gradient sinks; gradients are discarded.
        leaves: aliases of its parameters.
        backend: the backend of the capture stream.
        generators: random generators that it draws from, besides the device's default.
        num_passes: number of passes.
        traces: whether to trace the operators of the last forward; runs at least one pass.

    Raises:
        CaptureError: the forward uses tensors whose gradients a replay would lose.
    """
    held_bytes, block_bytes, trace, offsets = 0, 0, None, None
    num_passes = max(num_passes, int(traces))
    if not num_passes:
        return WarmUp(0, 0, None, None)
    with backend.on_capture_stream(), tensors_kept(chunk), sinks.discarding(leaves):
        for number in range(num_passes):
            before = backend.allocated_bytes()
            inputs = [static_like(t) for t in sample.tensors]
            is_last = number == num_passes - 1
            peak = _PeakWatch(backend)
            # Temporaries go to scratch if the plan needs a trace, and do not count.
            with (
                nullcontext() if traces else peak,
                watch_operators() if traces and is_last else nullcontext() as watch,
                backend.measure_draws(generators) as offsets,
            ):
                results = flatten(call_with(chunk, sample, inputs))[0]
            held_bytes = backend.allocated_bytes() - before
            peak_bytes = max(peak.num_bytes, backend.divisible_bytes())
            trace = watch.trace() if watch is not None else None
            outputs = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            refuse_undeclared(chunk, outputs, [*inputs, *leaves])
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
            if chunk.is_split:
                delayed = DelayedModules(chunk.module, chunk.label)
                delayed.run(leaves, lambda _index, _gradient: None)
            if chunk.end_of_backward is not None:
                chunk.end_of_backward()
            del results, outputs
            for leaf in inputs:
                leaf.grad = None
            # Allocations that stay after a first pass, such as workspaces, belong to no slot.
            block_bytes = max(0, peak_bytes - backend.divisible_bytes())
    return WarmUp(held_bytes, block_bytes, trace, offsets)


class _PeakWatch(OperatorMode):
    """Measure the peak of the bytes in divisible blocks, after each operator.

    The allocator's own peak belongs to the user, who alone resets it.

    Args:
        backend: Backend whose `divisible_bytes` is measured.

    Attributes:
        num_bytes: The peak so far.
    """

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        self.num_bytes = 0
        self._backend = backend

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        result = func(*args, **kwargs)
        self.num_bytes = max(self.num_bytes, self._backend.divisible_bytes())
        return result


def check_memory(
    chunks: Sequence[Chunk],
    num_slots: Sequence[int],
    held_bytes: Sequence[int],
    backend: GraphBackend,
    *,
    are_shared: bool = False,
) -> None:
    """Refuse a session that cannot fit, before its first allocation.

    Args:
        chunks: the chunks of the rank.
        num_slots: number of slots of each chunk.
        held_bytes: bytes that one forward of each chunk holds until its backward.
        backend: the backend of the memory.
        are_shared: whether the chunks share the slots.

    Raises:
        CaptureError: the slots do not fit; the message has the sizes and the remedies.
    """
    by_chunk = [n * held for n, held in zip(num_slots, held_bytes, strict=True)]
    required_bytes = max(by_chunk) if are_shared else sum(by_chunk)
    free_bytes = backend.free_bytes()
    if free_bytes is None or required_bytes <= free_bytes:
        return
    parts = ", ".join(
        f"{chunk.label}: {n} slots of {held / 2**20:.0f} MiB"
        for chunk, n, held in zip(chunks, num_slots, held_bytes, strict=True)
    )
    raise CaptureError(
        f"The slots need {required_bytes / 2**20:.0f} MiB ({parts}), but only "
        f"{free_bytes / 2**20:.0f} MiB of {backend.device} are free; nothing was captured.\n"
        "  To do: use a smaller microbatch or sequence, selective recompute, fewer layers per "
        "rank, or fewer slots (num_slots) if steps have few microbatches."
    )
