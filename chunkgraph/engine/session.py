"""The capture session: all slots of all chunks of a rank, at one step boundary.

Order: capture warmup on the capture stream; every forward, each in its slot's pool; every
backward, which frees the saved tensors of its slot into the slot's own pool, where nobody but that
backward ever allocates again; the proof. Gradients, buffers and random state are as if the session
had not happened. A session that fails leaves nothing behind.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.aliases import ParameterAliases
from chunkgraph.engine.chunk import Chunk, GradientMarker
from chunkgraph.engine.gradients import GradientSinks
from chunkgraph.engine.leaves import check_outputs
from chunkgraph.engine.signature import Call, Signature, flatten
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.static_inputs import call_with, static_like
from chunkgraph.engine.warm_up import check_memory, warm_up
from chunkgraph.errors import CaptureError, MemoryPlanError
from chunkgraph.graphs import (
    AddressRanges,
    Graph,
    GraphBackend,
    OperatorTrace,
    Pool,
)
from chunkgraph.memory import MemoryPlan, PoolPlan, SlotFootprint, prove_disjoint

__all__ = ["CaptureReport", "CapturedRank", "OnCapture", "SessionSettings", "capture_session"]


OnCapture = Callable[[int, int, int | None], None]
"""Called after every graph with graphs captured, all graphs, and bytes left (None: unknown)."""


@dataclass(frozen=True)
class SessionSettings:
    """How a session captures; see `CaptureOptions` and `ChunkGraphs` for the fields."""

    memory_plan: MemoryPlan = "shared_backward"
    num_passes: int = 1
    prove: bool = True
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    preserve: Callable[[], AbstractContextManager[object]] = nullcontext
    generators: Callable[[], Sequence[torch.Generator]] = tuple
    progress: OnCapture | None = None


@dataclass(frozen=True)
class CaptureReport:
    """What a session made.

    Attributes:
        num_slots: per chunk.
        num_graphs: forward and backward graphs together.
        slot_bytes: reserved by the slots' own pools.
        held_bytes: of those, in use between a forward and its backward, all slots together.
        scratch_bytes: reserved by the pool shared by all backwards.
        static_bytes: inputs and gradients outside the pools.
        duration_ms: wall time of the session on this rank.
    """

    num_slots: tuple[int, ...]
    num_graphs: int
    slot_bytes: int
    held_bytes: int
    scratch_bytes: int
    static_bytes: int
    duration_ms: float


@dataclass(frozen=True)
class CapturedRank:
    """The result of a session: slots by chunk, with what replays need."""

    slots: tuple[tuple[Slot, ...], ...]
    signatures: tuple[Signature, ...]
    sinks: tuple[GradientSinks, ...]
    pools: PoolPlan
    report: CaptureReport


@dataclass
class _Forward:
    """A captured forward whose autograd graph is still alive."""

    chunk_index: int
    index: int
    label: str
    inputs: list[torch.Tensor]
    leaves: list[Any]
    spec: Any
    graph: Graph
    pool: Pool
    live: AddressRanges
    grads: list[torch.Tensor] = field(default_factory=list)
    input_grads: list[torch.Tensor | None] = field(default_factory=list)
    backward: Graph | None = None
    marker: GradientMarker | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def differentiable(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.tensors) if t.requires_grad)


def capture_session(
    chunks: Sequence[Chunk],
    num_slots: Sequence[int],
    samples: Sequence[Call],
    backend: GraphBackend,
    settings: SessionSettings,
) -> CapturedRank:
    """Capture ``num_slots[c]`` slots of every chunk ``c`` from its sample call.

    Args:
        chunks: the chunks of this rank.
        num_slots: how many slots each needs.
        samples: one call's arguments for each chunk, as an eager microbatch had them.
        backend: makes the graphs.
        settings: see `SessionSettings`.

    Raises:
        CaptureError: a chunk cannot be captured; no graph, pool or buffer is left.
        MemoryPlanError: the proof failed; likewise.
    """
    start = time.perf_counter()
    pools = PoolPlan(settings.memory_plan, backend, chunks[0].label.split(" chunk")[0])
    sinks = tuple(GradientSinks(chunk.parameters, chunk.label) for chunk in chunks)
    aliases = tuple(ParameterAliases(chunk.module, chunk.parameters) for chunk in chunks)
    forwards: list[_Forward] = []
    try:
        with ExitStack() as stack:
            stack.enter_context(settings.preserve())
            stack.enter_context(backend.preserve_random_state())
            stack.enter_context(_preserved([b for chunk in chunks for b in chunk.buffers]))
            if backend.device.type == "cuda":
                stack.enter_context(_collector_paused())
            stack.enter_context(settings.scope())
            for alias in aliases:
                stack.enter_context(alias.in_place())
            # What eager steps left in the cache serves neither another stream nor a pool.
            backend.release_cached_memory()
            warm = [
                warm_up(
                    chunk,
                    samples[c],
                    sinks[c],
                    aliases[c].leaves,
                    backend,
                    num_passes=settings.num_passes,
                    traces=settings.memory_plan == "shared_temporaries",
                )
                for c, chunk in enumerate(chunks)
            ]
            check_memory(chunks, num_slots, [w.held_bytes for w in warm], backend)
            backend.release_cached_memory()
            total = 2 * sum(num_slots)
            for c, (chunk, sample) in enumerate(zip(chunks, samples, strict=True)):
                for s in range(num_slots[c]):
                    forwards.append(
                        _capture_forward(
                            c,
                            s,
                            chunk,
                            sample,
                            aliases[c].leaves,
                            warm[c].trace,
                            backend,
                            pools,
                            settings,
                        )
                    )
                    _report_progress(settings, len(forwards), total, backend)
            for number, forward in enumerate(forwards, start=len(forwards) + 1):
                c = forward.chunk_index
                leaves = aliases[c].leaves
                make_marker = chunks[c].new_marker
                forward.marker = make_marker() if make_marker is not None else None
                _capture_backward(forward, chunks[c], sinks[c], leaves, backend, pools, settings)
                _report_progress(settings, number, total, backend)
            if settings.prove:
                prove_disjoint([_footprint(f, backend) for f in forwards])
    except BaseException:
        for forward in forwards:
            forward.graph.release()
            if forward.backward is not None:
                forward.backward.release()
        raise
    backend.synchronize()
    slots = tuple(
        tuple(_slot(f, chunk, backend) for f in forwards if f.chunk_index == c)
        for c, chunk in enumerate(chunks)
    )
    signatures = tuple(Signature(s, c.label) for s, c in zip(samples, chunks, strict=True))
    report = CaptureReport(
        num_slots=tuple(num_slots),
        num_graphs=2 * len(forwards),
        slot_bytes=sum(pool.reserved_bytes for pool in pools.slot_pools),
        held_bytes=sum(f.live.num_bytes for f in forwards),
        scratch_bytes=pools.scratch.reserved_bytes if pools.scratch else 0,
        static_bytes=sum(_num_bytes([*f.inputs, *f.grads]) for f in forwards),
        duration_ms=(time.perf_counter() - start) * 1e3,
    )
    return CapturedRank(slots, signatures, sinks, pools, report)


def _capture_forward(
    c: int,
    s: int,
    chunk: Chunk,
    sample: Call,
    leaves: Sequence[nn.Parameter],
    trace: OperatorTrace | None,
    backend: GraphBackend,
    pools: PoolPlan,
    settings: SessionSettings,
) -> _Forward:
    label = f"{chunk.label} slot {s}"
    inputs = [static_like(t) for t in sample.tensors]
    pool = pools.forward_pool(label)
    router = pools.router(trace)
    before = pool.live()
    with (
        torch.enable_grad(),
        backend.capture(f"{label} forward", pool, settings.generators(), router) as graph,
    ):
        result = call_with(chunk, sample, inputs)
    if router is not None and (live := router.scratch.live()):
        graph.release()
        raise MemoryPlanError(
            f"{label}: its forward keeps {live.num_bytes} bytes that its eager pass dropped, so "
            "they were taken from scratch, where the next replay would overwrite them. A forward "
            "that caches something in some calls does this. Use memory_plan 'shared_backward'."
        )
    results, spec = flatten(result)
    forward = _Forward(c, s, label, inputs, results, spec, graph, pool, _minus(pool.live(), before))
    outputs = [forward.tensors[i] for i in forward.differentiable]
    try:
        check_outputs(chunk.label, outputs, [*inputs, *leaves])
    except CaptureError:
        graph.release()
        raise
    return forward


def _capture_backward(
    forward: _Forward,
    chunk: Chunk,
    sinks: GradientSinks,
    leaves: Sequence[nn.Parameter],
    backend: GraphBackend,
    pools: PoolPlan,
    settings: SessionSettings,
) -> None:
    outputs = [forward.tensors[i] for i in forward.differentiable]
    forward.grads = [torch.zeros_like(t, requires_grad=False) for t in outputs]
    label = f"{forward.label} backward"
    pool = pools.backward_pool(forward.pool)
    accumulating = sinks.accumulating(leaves, forward.marker)
    with accumulating, backend.capture(label, pool, settings.generators()) as graph:
        # Not autograd.grad, which forbids the backwards inside a backward of recomputation.
        torch.autograd.backward(outputs, forward.grads)
        if chunk.end_of_backward is not None:
            chunk.end_of_backward()
    forward.backward = graph
    for tensor in forward.inputs:
        forward.input_grads.append(tensor.grad)
        tensor.grad = None


def _slot(forward: _Forward, chunk: Chunk, backend: GraphBackend) -> Slot:
    assert forward.backward is not None
    return Slot(
        chunk=forward.chunk_index,
        index=forward.index,
        label=forward.label,
        inputs=tuple(t.detach() for t in forward.inputs),
        outputs=tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in forward.leaves),
        output_spec=forward.spec,
        differentiable=forward.differentiable,
        output_grads=tuple(forward.grads),
        input_grads=tuple(forward.input_grads),
        forward_graph=forward.graph,
        backward_graph=forward.backward,
        pool=forward.pool,
        grads_lie_in_pool=any(
            g is not None and bool(backend.raw(g) & forward.pool.reserved())
            for g in forward.input_grads
        ),
        marker=forward.marker,
        keeps_input_grads=chunk.keeps_input_grads,
    )


def _footprint(forward: _Forward, backend: GraphBackend) -> SlotFootprint:
    assert forward.backward is not None
    live = forward.live
    for tensor in (*forward.inputs, *forward.grads):
        live = live | backend.raw(tensor)
    graphs = (forward.graph, forward.backward)
    return SlotFootprint(forward.label, live, {g.label: g.writes() for g in graphs})


def _minus(after: AddressRanges, before: AddressRanges) -> AddressRanges:
    """Addresses in ``after`` that are not in ``before``."""
    left: list[tuple[int, int]] = []
    for r in after:
        start = r.start
        for b in AddressRanges([r]) & before:
            left.append((start, b.start))
            start = b.end
        left.append((start, r.end))
    return AddressRanges(left)


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _report_progress(
    settings: SessionSettings, done: int, total: int, backend: GraphBackend
) -> None:
    if settings.progress is not None:
        settings.progress(done, total, backend.free_bytes())


@contextmanager
def _preserved(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    saved = [t.detach().clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A collection inside a capture may free CUDA objects, which a capture does not allow."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
