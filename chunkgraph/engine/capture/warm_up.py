"""Run eager passes before a capture session, and measure the memory that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from chunkgraph.engine.capture.gradients import GradientSinks
from chunkgraph.engine.capture.preserved import tensors_kept
from chunkgraph.engine.capture.slot_capture import refuse_undeclared
from chunkgraph.engine.capture.static_inputs import call_with, static_like
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.signature import Call, flatten
from chunkgraph.engine.split.delayed import DelayedModules
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import Allocation, GraphBackend, block_bytes
from chunkgraph.memory import MemoryPlan

__all__ = ["WarmUp", "check_memory", "warm_up"]


@dataclass(frozen=True)
class WarmUp:
    """Measurements of a chunk's eager passes.

    Attributes:
        held_bytes: bytes that one forward holds until its backward; 0 without a pass, or if the
            backend does not count.
        slot_bytes: `block_bytes` of what the pass allocates in a slot's pool.
        scratch_bytes: `block_bytes` of what it allocates in the pool that all backwards share.
        changes_state: whether the passes write tensors of the chunk; True without a pass.
    """

    held_bytes: int
    slot_bytes: int
    scratch_bytes: int
    changes_state: bool = True


def warm_up(
    chunk: Chunk,
    sample: Call,
    sinks: GradientSinks,
    leaves: Sequence[nn.Parameter],
    backend: GraphBackend,
    *,
    num_passes: int,
    plan: MemoryPlan,
) -> WarmUp:
    """Run eager passes on the capture stream, where libraries create handles and tune.

    Restores the chunk's tensors.

    Args:
        chunk: the chunk to run forward and backward.
        sample: its arguments; the values are copied.
        sinks: its gradient sinks; gradients are discarded.
        leaves: aliases of its parameters.
        backend: the backend of the capture stream.
        num_passes: number of passes.
        plan: see `chunkgraph.memory.pools`.

    Raises:
        CaptureError: the forward uses tensors whose gradients a replay would lose.
    """
    held_bytes, sizes = 0, (0, 0)
    if not num_passes:
        return WarmUp(0, 0, 0)
    with (
        backend.on_capture_stream(),
        tensors_kept(chunk) as kept,
        sinks.discarding(leaves),
    ):
        for _ in range(num_passes):
            before = backend.allocated_bytes()
            inputs = [static_like(t) for t in sample.tensors]
            with backend.observe_allocations() as log:
                results = flatten(call_with(chunk, sample, inputs))[0]
                held_bytes = backend.allocated_bytes() - before
                num_forward = log.num_events()
                outputs = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
                refuse_undeclared(chunk, outputs, [*inputs, *leaves])
                grads = [torch.ones_like(t) for t in outputs]
                num_before = log.num_events()
                delayed = DelayedModules(chunk.module if chunk.is_split else None, chunk.label)
                # Without an input half, one graph holds the whole backward.
                with nullcontext() if sample.takes_gradients else delayed.computing_at_once():
                    torch.autograd.backward(outputs, grads)
                    delayed.run(leaves, lambda _index, _gradient: None)
                if chunk.end_of_backward is not None:
                    chunk.end_of_backward()
                del results, outputs, grads
                for leaf in inputs:
                    leaf.grad = None
                sizes = _blocks(log.allocations(), num_forward, num_before, plan)
    return WarmUp(held_bytes, *sizes, kept.were_written)


def _blocks(
    allocations: Sequence[Allocation], num_forward: int, num_before: int, plan: MemoryPlan
) -> tuple[int, int]:
    """Return the blocks of a pass in the slot's pool and in scratch.

    Args:
        allocations: those of one pass. What stays in use after it, such as workspaces that a first
            pass creates, belongs to no slot.
        num_forward: number of events of the forward.
        num_before: number of events before the backward.
        plan: see `chunkgraph.memory.pools`.
    """
    freed = [a for a in allocations if a.end is not None]
    forward = [a for a in freed if a.begin < num_forward]
    backward = [a for a in freed if a.begin >= num_before]
    if plan in ("pool_per_slot", "one_pool"):
        return block_bytes(forward + backward), 0
    return block_bytes(forward), block_bytes(backward)


def check_memory(
    chunks: Sequence[Chunk],
    num_slots: Sequence[int],
    held_bytes: Sequence[int],
    backend: GraphBackend,
    *,
    are_shared: bool = False,
    gradient_bytes: int = 0,
) -> None:
    """Refuse a session that cannot fit, before its first allocation.

    Args:
        chunks: the chunks of the rank.
        num_slots: number of slots of each chunk.
        held_bytes: bytes that one forward of each chunk holds until its backward.
        backend: the backend of the memory.
        are_shared: whether the chunks share the slots.
        gradient_bytes: bytes of the gradient sinks, which the session allocates too.

    Raises:
        CaptureError: the slots do not fit; the message has the sizes and the remedies.
    """
    by_chunk = [n * held for n, held in zip(num_slots, held_bytes, strict=True)]
    required_bytes = (max(by_chunk) if are_shared else sum(by_chunk)) + gradient_bytes
    free_bytes = backend.free_bytes()
    if free_bytes is None or required_bytes <= free_bytes:
        return
    parts = ", ".join(
        f"{chunk.label}: {n} slots of {held / 2**20:.0f} MiB"
        for chunk, n, held in zip(chunks, num_slots, held_bytes, strict=True)
    )
    if gradient_bytes >= 2**20:
        parts += f", gradients: {gradient_bytes / 2**20:.0f} MiB"
    raise CaptureError(
        f"The graphs need {required_bytes / 2**20:.0f} MiB ({parts}), but only "
        f"{free_bytes / 2**20:.0f} MiB of {backend.device} are free; nothing was captured.\n"
        "  To do: use a smaller microbatch or sequence, selective recompute, fewer layers per "
        "rank, or fewer slots (num_slots) if steps have few microbatches."
    )
