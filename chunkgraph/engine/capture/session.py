"""The capture session: all slots of all chunks of a rank, at one step boundary.

Order: capture warmup on the capture stream; every forward, each in its slot's pool; every
backward, which frees the saved tensors of its slot into the slot's own pool, where nobody but that
slot ever allocates again; the proof. With several banks, forwards and backwards of the largest
first, then those of the next, whose variant of a slot takes the memory that the one before left in
the slot's pool. Gradients, the modules' tensors and random state are as if the session had not
happened. A session that fails leaves nothing behind.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from chunkgraph._collector import collector_paused
from chunkgraph.engine.banks import Bank
from chunkgraph.engine.capture.grad_memory import GradMemory
from chunkgraph.engine.capture.gradients import GradientSinks
from chunkgraph.engine.capture.left_behind import LeafGradients, refuse_left_behind
from chunkgraph.engine.capture.parameter_aliases import ParameterAliases
from chunkgraph.engine.capture.slot_capture import (
    CapturedForward,
    capture_backward,
    capture_forward,
    footprint,
    new_slot,
)
from chunkgraph.engine.capture.static_inputs import SlotStatics
from chunkgraph.engine.capture.warm_up import WarmUp, check_memory, warm_up
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.host import Host
from chunkgraph.engine.options import OnCapture
from chunkgraph.engine.signature import Call, Signature
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.watch.attribute_watch import AttributeWatch
from chunkgraph.engine.watch.captured_model import CapturedModel, saved_tensors_hooks
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import AddressRanges, GraphBackend, Pool
from chunkgraph.memory import MemoryPlan, PoolPlan, prove_disjoint

__all__ = [
    "BeforeGraph",
    "CaptureReport",
    "CapturedRank",
    "SessionSettings",
    "capture_session",
]


BeforeGraph = Callable[[Hashable | None], None]
"""Called before each part of a session with the bank it is for; None: for all of them."""


@dataclass(frozen=True)
class SessionSettings:
    """How a session captures; see `CaptureOptions` and `ChunkGraphs` for the fields."""

    host: Host
    memory_plan: MemoryPlan = "shared_backward"
    shared_slots: bool = False
    num_passes: int = 1
    prove: bool = True
    progress: OnCapture | None = None
    before_graph: BeforeGraph = lambda _: None


@dataclass(frozen=True)
class CaptureReport:
    """What a session made.

    Attributes:
        num_slots: per chunk.
        shared_slots: whether these are the same for all chunks.
        num_graphs: forward and backward graphs together.
        slot_bytes: reserved by the slots' own pools.
        held_bytes: of those, in use between a forward and its backward, all slots together, each
            in its largest bank.
        scratch_bytes: reserved by the pool shared by all backwards.
        static_bytes: inputs and gradients outside the pools.
        duration_ms: wall time of the session on this rank.
        memsets_kept: see `GraphBackend`.
    """

    num_slots: tuple[int, ...]
    shared_slots: bool
    num_graphs: int
    slot_bytes: int
    held_bytes: int
    scratch_bytes: int
    static_bytes: int
    duration_ms: float
    memsets_kept: str = ""


@dataclass(frozen=True)
class CapturedRank:
    """The result of a session, with what replays need.

    Attributes:
        banks: by key, largest first.
        sinks: of the gradients, by chunk.
        models: what the graphs take for granted of each chunk's module.
        pools: of all graphs.
        report: what was made.
        terms: see `BackwardTask`.
    """

    banks: dict[Hashable, Bank]
    sinks: tuple[GradientSinks, ...]
    models: tuple[CapturedModel, ...]
    pools: PoolPlan
    report: CaptureReport
    terms: tuple[dict[int, int], ...]

    @property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """Slots of each chunk: those of the first bank, then their variants in the others."""
        every = zip(*[bank.slots for bank in self.banks.values()], strict=True)
        return tuple(tuple(slot for slots in of_chunk for slot in slots) for of_chunk in every)


def capture_session(
    chunks: Sequence[Chunk],
    num_slots: Sequence[int],
    samples: Mapping[Hashable, Sequence[Call]],
    backend: GraphBackend,
    settings: SessionSettings,
) -> CapturedRank:
    """Capture ``num_slots[c]`` slots of every chunk ``c`` in every bank from its sample call.

    Args:
        chunks: the chunks of this rank.
        num_slots: how many slots each needs.
        samples: by bank, largest first, one call's arguments for each chunk, as an eager
            microbatch had them.
        backend: makes the graphs.
        settings: see `SessionSettings`.

    Raises:
        CaptureError: a chunk cannot be captured; no graph, pool or buffer is left.
        MemoryPlanError: the proof failed; likewise.
    """
    if hooks := saved_tensors_hooks():
        raise CaptureError(f"{chunks[0].label} is captured {hooks}")
    pools = PoolPlan(settings.memory_plan, backend, chunks[0].label.split(" chunk")[0])
    gradients = LeafGradients()
    captured: CapturedRank | None = None
    try:
        captured = _captured(chunks, num_slots, samples, backend, settings, pools)
        slots = [slot for of_chunk in captured.slots for slot in of_chunk]
        if not any(chunk.may_leave_values for chunk in chunks):
            gradients.refuse_lost(chunks[0].label, pools.pools, _writes(slots, backend))
            refuse_left_behind(chunks, pools.pools, slots)
    except BaseException:
        for slot in (s for of_chunk in (captured.slots if captured else ()) for s in of_chunk):
            slot.release()
        raise
    return captured


def _writes(slots: Sequence[Slot], backend: GraphBackend) -> AddressRanges | None:
    """What the backwards write, where the backend knows it exactly."""
    if backend.device.type == "cuda":
        return None
    graphs = [slot.backward_graph for slot in slots if slot.backward_graph is not None]
    return AddressRanges([r for graph in graphs for r in graph.writes()])


def _captured(
    chunks: Sequence[Chunk],
    num_slots: Sequence[int],
    samples: Mapping[Hashable, Sequence[Call]],
    backend: GraphBackend,
    settings: SessionSettings,
    pools: PoolPlan,
) -> CapturedRank:
    """The session itself; when it returns, nobody but slots should hold memory of graphs."""
    start = time.perf_counter()
    grad_memory = GradMemory({id(p): p for chunk in chunks for p in chunk.parameters}.values())
    sinks = tuple(GradientSinks(c.parameters, c.label, grad_memory) for c in chunks)
    models = tuple(CapturedModel(chunk) for chunk in chunks)
    for model, chunk in zip(models, chunks, strict=True):
        model.refuse_hooks(chunk.parameters)
    stand_ins: dict[int, nn.Parameter] = {}
    aliases = tuple(ParameterAliases(c.module, c.parameters, stand_ins) for c in chunks)
    forwards: list[CapturedForward] = []
    try:
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(model.watched())
            stack.enter_context(settings.host.preserving())
            stack.enter_context(backend.preserve_random_state(settings.host.generators()))
            if backend.device.type == "cuda":
                gc.collect()  # none is started until the last graph is captured
                stack.enter_context(collector_paused())
            # The scope may be one that ranks enter together: not if one has failed by now.
            settings.before_graph(None)
            # What is in the cache serves neither another stream nor a pool. Before the scope, which
            # may allocate in its stead; and after what follows.
            backend.release_cached_memory()
            stack.enter_context(settings.host.capturing())
            for alias in aliases:
                stack.enter_context(alias.in_place())
            watches = [None if c.may_leave_values else AttributeWatch(c) for c in chunks]
            for attributes in watches:
                if attributes is not None:
                    stack.enter_context(attributes.kept())
            chunks = [
                chunk if attributes is None else attributes.chunk
                for chunk, attributes in zip(chunks, watches, strict=True)
            ]
            backend.release_cached_memory()
            warm: dict[Hashable, list[WarmUp]] = {key: [] for key in samples}
            for key, calls in samples.items():
                for c, (chunk, call) in enumerate(zip(chunks, calls, strict=True)):
                    settings.before_graph(key)
                    found = warm_up(
                        chunk,
                        call,
                        sinks[c],
                        aliases[c].leaves,
                        backend,
                        num_passes=settings.num_passes,
                        traces=settings.memory_plan == "shared_temporaries",
                    )
                    warm[key].append(found)
            settings.before_graph(None)
            passes = list(zip(*warm.values(), strict=True))  # by chunk
            most = [max(w.held_bytes for w in of_chunk) for of_chunk in passes]
            kept = [max(w.kept_bytes for w in of_chunk) for of_chunk in passes]
            check_memory(chunks, num_slots, most, backend, are_shared=settings.shared_slots)
            allocated = backend.allocated_bytes()
            backend.release_cached_memory()
            if backend.allocated_bytes() < allocated:
                backend.take_workspaces()
            total, done = 2 * sum(num_slots) * len(samples), 0
            slot_pools: dict[Hashable, Pool] = {}
            statics: dict[Hashable, SlotStatics] = {}
            has_variants = len(samples) > 1 or (settings.shared_slots and len(chunks) > 1)
            for variant in _variants(samples, len(chunks), settings.shared_slots):
                begin = len(forwards)
                for key, c in variant:
                    chunk = chunks[c]
                    for s in range(num_slots[c]):
                        settings.before_graph(key)
                        label = f"{chunk.label} slot {s}"
                        place = s if settings.shared_slots else (c, s)
                        if place not in slot_pools:
                            ahead = max(kept) if settings.shared_slots else kept[c]
                            slot_pools[place] = pools.forward_pool(label, ahead)
                            statics[place] = SlotStatics(is_shared=has_variants)
                        forwards.append(
                            capture_forward(
                                (c, s, key),
                                label if len(samples) == 1 else f"{label}, bank {key}",
                                slot_pools[place],
                                chunk,
                                samples[key][c],
                                aliases[c].leaves,
                                warm[key][c].trace,
                                backend,
                                pools,
                                statics[place],
                                settings.host.generators,
                            )
                        )
                        done += 1
                        _report_progress(settings, done, total, backend)
                # They free what the forwards keep, for the next variant of each slot.
                for forward in forwards[begin:]:
                    settings.before_graph(forward.bank)
                    c = forward.chunk_index
                    leaves = aliases[c].leaves
                    make_marker = chunks[c].new_marker
                    forward.marker = make_marker() if make_marker is not None else None
                    capture_backward(
                        forward,
                        chunks[c],
                        sinks[c],
                        leaves,
                        backend,
                        pools,
                        settings.host.generators,
                    )
                    done += 1
                    _report_progress(settings, done, total, backend)
            settings.before_graph(None)
            for alias, chunk in zip(aliases, chunks, strict=True):
                alias.check_memory(chunk.label)
            if settings.prove:
                prove_disjoint([footprint(f, backend, settings.shared_slots) for f in forwards])
    except BaseException:
        for forward in forwards:
            forward.graph.release()
            if forward.backward is not None:
                forward.backward.release()
        raise
    backend.synchronize()
    banks = {
        key: Bank(
            key,
            tuple(
                tuple(
                    new_slot(f, chunk, backend)
                    for f in forwards
                    if (f.chunk_index, f.bank) == (c, key)
                )
                for c, chunk in enumerate(chunks)
            ),
            tuple(Signature(s, c.label) for s, c in zip(calls, chunks, strict=True)),
        )
        for key, calls in samples.items()
    }
    held: dict[Hashable, int] = {}
    for f in forwards:
        slot = f.slot(settings.shared_slots)
        held[slot] = max(held.get(slot, 0), f.live.num_bytes)
    report = CaptureReport(
        num_slots=tuple(num_slots),
        shared_slots=settings.shared_slots,
        num_graphs=2 * len(forwards),
        slot_bytes=sum(pool.reserved_bytes for pool in pools.slot_pools),
        held_bytes=sum(held.values()),
        scratch_bytes=pools.scratch.reserved_bytes if pools.scratch else 0,
        static_bytes=_num_bytes([t for f in forwards for t in (*f.inputs, *f.grads)]),
        duration_ms=(time.perf_counter() - start) * 1e3,
        memsets_kept=backend.memsets_kept,
    )
    return CapturedRank(banks, sinks, models, pools, report, _terms(chunks, forwards))


def _terms(
    chunks: Sequence[Chunk], forwards: Sequence[CapturedForward]
) -> tuple[dict[int, int], ...]:
    """Return what each chunk gives its parameters, the most of any forward; see `BackwardTask`."""
    terms: list[dict[int, int]] = [{} for _ in chunks]
    for forward in forwards:
        of_chunk, parameters = terms[forward.chunk_index], chunks[forward.chunk_index].parameters
        for index in forward.trained:
            place = id(parameters[index])
            # A parameter that recomputation hides may get any number.
            of_chunk[place] = max(of_chunk.get(place, 1), forward.num_terms[index] or 2)
    return tuple(terms)


def _variants(
    samples: Mapping[Hashable, Sequence[Call]], num_chunks: int, are_shared: bool
) -> list[list[tuple[Hashable, int]]]:
    """What is captured together, bank and chunk: at most one variant of every slot."""
    if are_shared:
        return [[(key, c)] for key in samples for c in range(num_chunks)]
    return [[(key, c) for c in range(num_chunks)] for key in samples]


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of their memory, which variants of a slot share."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _report_progress(
    settings: SessionSettings, done: int, total: int, backend: GraphBackend
) -> None:
    if settings.progress is not None:
        settings.progress(done, total, backend.free_bytes())
