"""Run eager passes before a capture session, and measure the memory that it needs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from chunkgraph.engine.capture.dangling import move_out
from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.output_gradients import leaves_below
from chunkgraph.engine.capture.refusals import refuse_undeclared, refusing_hidden
from chunkgraph.engine.capture.restore import restoring_writes
from chunkgraph.engine.capture.saved import saved_tensors
from chunkgraph.engine.capture.self_test import Measured, Noise, check_passes
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.layout import memory_of
from chunkgraph.engine.passes import GradientOrder, Pass
from chunkgraph.engine.program import Isolated, program_of
from chunkgraph.engine.tree import Call
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import AddressRanges, Allocation, GraphBackend, Pool, block_bytes


@dataclass(frozen=True)
class WarmUp:
    """Measurements of a chunk's eager passes.

    Attributes:
        held_bytes: bytes that one forward holds until its backward; 0 if the backend does not
            count.
        slot_bytes: `block_bytes` of what the pass allocates in a slot's pool; if the backend does
            not count, what autograd saves, without parameters.
        in_slot: these allocations in a slot's pool; none if the backend does not count.
        in_scratch: its allocations in the pool that all backwards share.
        passes: what each pass computes, for the self-test.
        noise: how far the passes are from repeating themselves.
        written: memory of parameters that the passes write.
    """

    held_bytes: int
    slot_bytes: int
    in_slot: tuple[Allocation, ...]
    in_scratch: tuple[Allocation, ...]
    passes: tuple[Measured, ...]
    noise: Noise
    written: tuple[torch.Tensor, ...]


def warm_up(own: Isolated, sample: Call, label: str, layers: LayerWatch) -> WarmUp:
    """Run eager passes on the capture stream, where libraries create handles and tune.

    Each begins with the same state, which is restored.

    Args:
        own: the chunk to run forward and backward.
        sample: its arguments; the values are copied.
        label: name of the chunk and bank in errors.
        layers: follows the chunk's layers.

    Raises:
        CaptureError: the forward uses tensors whose gradients a replay would lose, or the passes
            differ by more than rounding.
    """
    chunk, sinks, leaves = own.chunk, own.sinks, own.leaves
    backend, host = own.maker.backend, own.maker.host
    passes: list[Measured] = []
    # Reuse slot memory, so that eager activations do not raise the peak.
    pools = own.maker.pools
    idle = None if chunk.has_backward else pools.next_idle
    for _ in range(1 if backend.repeats_bits else 2):
        sinks.clear()
        backend.release_cached_memory()  # else blocks that the last pass split add to the peak
        with (
            refusing_hidden(chunk, leaves),
            backend.on_capture_stream(),
            backend.preserve_random_state(host.generators()),
            host.preserving(),
            restoring_writes(chunk) as written,
        ):
            before = backend.allocated_bytes()
            call = Pass(chunk, sample)
            with backend.observe_allocations() as log:
                with nullcontext() if idle is None else idle.serving_this_thread():
                    call.forward()
                held_bytes = backend.allocated_bytes() - before
                marks = [log.num_events()]
                refuse_undeclared(chunk, leaves_below(call.outputs), [*call.inputs, *leaves])
                drawn = backend.default_generator, *host.generators()
                measured = Measured.of(call.leaves, chunk.buffers, drawn)
                measured = measured.with_saved(saved_tensors(call.leaves, layers))
                call.make_output_grads()
                marks.append(log.num_events())
                order, totals = _run_backward(own, call)
                marks.append(log.num_events())
                measured = measured.with_backward(call.input_grads(), totals, order)
                del call
                marks.append(log.num_events())
                del totals
                in_slot, in_scratch = _by_pool(log.allocations(), marks, pools.scratch)
        passes.append(measured)
        # torch's first call of some operators leaves cycles whose frames hold the pass.
        gc.collect(0)
        if idle is not None:
            move_out(idle)
    noise = check_passes(label, passes)
    slot_bytes = block_bytes(in_slot)
    if not slot_bytes:
        kept = AddressRanges((t.address, t.address + t.num_bytes) for t in measured.saved)
        slot_bytes = (kept - AddressRanges(filter(None, map(memory_of, leaves)))).num_bytes
    return WarmUp(held_bytes, slot_bytes, in_slot, in_scratch, tuple(passes), noise, tuple(written))


def _run_backward(own: Isolated, call: Pass) -> tuple[tuple[int, ...], list[torch.Tensor | None]]:
    """Run the backward of a call; return the order and the sums of its gradients.

    A parameter without a gradient has None.
    """
    chunk, leaves, order = own.chunk, own.leaves, GradientOrder()
    if not chunk.has_backward:
        return (), []
    program = program_of(chunk)
    with own.sinks.summing(leaves, order) as (sums, totals), call.gradients.casting():
        with program.run_backward(chunk, call.sample, leaves, sums.add):
            call.backward()
        sums.finish()
        if chunk.end_of_backward is not None:
            chunk.end_of_backward()
    trained = set(order.seen)
    return tuple(order.seen), [totals[i] if i in trained else None for i in range(len(leaves))]


def _by_pool(
    allocations: Sequence[Allocation], marks: Sequence[int], scratch: Pool | None
) -> tuple[tuple[Allocation, ...], tuple[Allocation, ...]]:
    """Return the allocations of a pass in the slot's pool and in scratch.

    Args:
        allocations: those of one pass. What stays in use after it, such as workspaces that a first
            pass creates, belongs to no slot.
        marks: numbers of events up to the end of the forward, the begin of the backward, its end,
            and until the sums of gradients are freed, which no graph allocates.
        scratch: the pool of all backwards, if there is one.
    """
    num_forward, num_before, num_backward, num_end = marks
    freed = [a for a in allocations if a.end is not None and a.end < num_end]
    forward = tuple(a for a in freed if a.begin < num_forward)
    backward = tuple(a for a in freed if num_before <= a.begin < num_backward)
    if scratch is None:
        return forward + backward, ()
    return forward, backward


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
