"""Capture warmup: eager passes before a session, and what they tell of the memory it needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from chunkgraph.engine.capture.gradients import GradientSinks
from chunkgraph.engine.capture.preserved import tensors_kept
from chunkgraph.engine.capture.static_inputs import call_with, static_like
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.signature import Call, flatten
from chunkgraph.engine.split.delayed import DelayedModules
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend, OperatorTrace, watch_operators

__all__ = ["WarmUp", "check_memory", "warm_up"]


@dataclass(frozen=True)
class WarmUp:
    """What an eager pass showed of a chunk.

    Attributes:
        held_bytes: what one forward holds until its backward; 0 without a pass or where nobody
            counts.
        kept_bytes: of those, what the backward gave back (all but its inputs and what a first pass
            allocates for good) in pieces that a reserved block can serve.
        trace: of the forward's operators, where the memory plan needs it.
    """

    held_bytes: int
    kept_bytes: int
    trace: OperatorTrace | None


def warm_up(
    chunk: Chunk,
    sample: Call,
    sinks: GradientSinks,
    leaves: Sequence[nn.Parameter],
    backend: GraphBackend,
    *,
    num_passes: int,
    traces: bool,
) -> WarmUp:
    """Run eager passes on the capture stream: libraries make handles and choose algorithms there.

    The chunk's tensors are as before afterwards.

    Args:
        chunk: to run forward and backward.
        sample: its arguments; their values are copied.
        sinks: of its gradients, which are discarded.
        leaves: Aliases of its parameters.
        backend: whose stream.
        num_passes: how many.
        traces: whether the last forward's operators are wanted, for which one pass is run at least.
    """
    held_bytes, kept_bytes, trace = 0, 0, None
    num_passes = max(num_passes, int(traces))
    if not num_passes:
        return WarmUp(0, 0, None)
    with backend.on_capture_stream(), tensors_kept(chunk), sinks.discarding(leaves):
        for number in range(num_passes):
            before = backend.allocated_bytes()
            inputs = [static_like(t) for t in sample.tensors]
            is_last = number == num_passes - 1
            with watch_operators() if traces and is_last else nullcontext() as watch:
                results = flatten(call_with(chunk, sample, inputs))[0]
            held_bytes = backend.allocated_bytes() - before
            divisible = backend.divisible_bytes()
            trace = watch.trace() if watch is not None else None
            outputs = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
            if chunk.is_split:
                delayed = DelayedModules(chunk.module, chunk.label)
                delayed.run(leaves, lambda _index, _gradient: None)
            if chunk.end_of_backward is not None:
                chunk.end_of_backward()
            del results, outputs
            for leaf in inputs:
                leaf.grad = None
            # What a first pass leaves for good, such as a library's workspace, no slot keeps.
            kept_bytes = max(0, divisible - backend.divisible_bytes())
    return WarmUp(held_bytes, kept_bytes, trace)


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
        chunks: of the rank.
        num_slots: of each.
        held_bytes: what one forward of each holds until its backward.
        backend: whose memory.
        are_shared: whether the chunks share the slots.

    Raises:
        CaptureError: with the numbers and the remedies.
    """
    every = [n * held for n, held in zip(num_slots, held_bytes, strict=True)]
    needed = max(every) if are_shared else sum(every)
    free = backend.free_bytes()
    if free is None or needed <= free:
        return
    parts = ", ".join(
        f"{chunk.label}: {n} slots of {held / 2**20:.0f} MiB"
        for chunk, n, held in zip(chunks, num_slots, held_bytes, strict=True)
    )
    raise CaptureError(
        f"The slots need {needed / 2**20:.0f} MiB ({parts}), but only {free / 2**20:.0f} MiB of "
        f"{backend.device} are free; nothing was captured.\n"
        "  To do: a smaller microbatch or sequence, selective recompute, fewer layers on a rank, "
        "or fewer slots where the number of microbatches is bounded (num_slots)."
    )
