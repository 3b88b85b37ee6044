"""The capture session: all slots of all chunks of a rank, at one step boundary.

`_run` shows its phases, in the order in which they happen:

1. `_enter`: isolate the model, random state and memory from training.
2. `_warm_up`: run eager passes on the capture stream.
3. `_choose_slots`: let the chunks share their slots if that takes less memory.
4. `_make_room`: refuse a session that cannot fit, and empty the allocator's cache.
5. Slot by slot, `_capture_forward` captures a forward in the slot's pool, and `_capture_backward`
   its backward, by the chunk's program. It frees the saved tensors into the pool, where only that
   slot ever allocates again. What modules keep is restored after each capture. Banks are
   captured from the largest to the smallest; the variants of a slot in smaller banks reuse its
   pool. `_test`
   replays the first slot of each chunk and bank, before the others are captured, and compares it
   with the eager passes.
6. `_prove`: no replay overwrites memory that another slot holds.

Gradients, the modules' tensors and random state are as if the session had not happened. A session
that fails leaves nothing in memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Any

import torch
from torch import nn

from chunkgraph._collector import collector_paused
from chunkgraph.engine.arguments import rank_label
from chunkgraph.engine.capture.dangling import Bookkeeping, refuse_dangling
from chunkgraph.engine.capture.graph_set import Bank, CaptureReport, GraphSet, SlotKey
from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.parameter_aliases import ParameterAliases
from chunkgraph.engine.capture.refusals import refuse_shared_parameters
from chunkgraph.engine.capture.restore import restoring, restoring_parts, writable
from chunkgraph.engine.capture.saved import SavedTensor, saved_tensors
from chunkgraph.engine.capture.self_test import Measured, difference, wrong_replay
from chunkgraph.engine.capture.static_inputs import SlotStatics
from chunkgraph.engine.capture.warm_up import WarmUp, check_memory, warm_up
from chunkgraph.engine.checks import ModelGuard
from chunkgraph.engine.chunk import Chunk, GradientMarker, Host
from chunkgraph.engine.gradients import GradientSinks, GradMemory
from chunkgraph.engine.hooks import refuse_contexts
from chunkgraph.engine.passes import Pass, fill_test_gradient
from chunkgraph.engine.program import (
    BackwardPlan,
    GraphMaker,
    Isolated,
    capture_forward,
    finish_slot,
    program_of,
)
from chunkgraph.engine.slot import Slot, SlotMemory
from chunkgraph.engine.tree import Call, Signature
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import AddressRanges, GraphBackend
from chunkgraph.memory import PoolPlan, SlotFootprint, prove_disjoint

BeginPart = Callable[[Hashable | None], None]
"""A function called before each part of a session with the bank of this part; None: all banks."""


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a session.

    Attributes:
        host: the training loop around the chunks.
        has_scratch: see `PoolPlan`.
        shared_slots: see `CaptureOptions`.
        num_together: see `ChunkGraphs`.
        limit: begins the trial of fewer slots (`chunkgraph.engine.paging`); None: there is none.
        begin_part: see `BeginPart`.
        any_rank: return whether the argument is true on any rank in the same part of its session.
        layers: follows the layers of the chunks.
        others: return the graphs that are replayed in other steps, whose memory serves here too.
    """

    host: Host
    has_scratch: bool
    shared_slots: bool = False
    num_together: int | None = None
    limit: Callable[[Session], Any] | None = None
    begin_part: BeginPart = lambda _: None
    any_rank: Callable[[bool], bool] = bool
    layers: LayerWatch = field(default_factory=LayerWatch)
    others: Callable[[], Sequence[GraphSet]] = tuple


_NUM_REPLAYS = 4  # of a slot under test that differs from eager passes


def capture_session(
    chunks: Sequence[Chunk],
    num_slots: Sequence[int],
    samples: Mapping[Hashable, Sequence[Call]],
    backend: GraphBackend,
    settings: SessionSettings,
) -> GraphSet:
    """Capture ``num_slots[c]`` slots of every chunk ``c`` in every bank from its sample call.

    Args:
        chunks: the chunks of this rank.
        num_slots: number of slots of each chunk.
        samples: by bank, largest first, one call's arguments for each chunk, as an eager
            microbatch had them.
        backend: makes the graphs.
        settings: see `SessionSettings`.

    Raises:
        CaptureError: a chunk cannot be captured; no graph, pool or buffer is left.
        MemoryPlanError: the proof failed; no graph, pool or buffer is left.
    """
    refuse_contexts(chunks[0].label, CaptureError)
    rank = rank_label(chunks)
    idle = [other.pools for other in settings.others()]
    pools = PoolPlan(backend, rank, idle, has_scratch=settings.has_scratch)
    captured: GraphSet | None = None
    try:
        # When `_run` returns, only slots may hold memory of graphs.
        maker = GraphMaker(backend, pools, settings.host)
        captured = _run(chunks, num_slots, samples, settings, maker)
        slots = [slot for of_chunk in captured.slots for slot in of_chunk]
        refuse_dangling(chunks[0].label if len(chunks) == 1 else rank, pools.pools, slots)
        pools.refuse_in_use()
    except BaseException:
        if captured is not None:
            captured.release()
        raise
    return captured


class Session:
    """State that the phases of one session share. It begins by taking memory for gradients.

    Args:
        chunks: see `capture_session`.
        num_slots: see `capture_session`; `_choose_slots` may change it.
        samples: see `capture_session`.
        settings: see `capture_session`; `_choose_slots` may change them.
        maker: makes the graphs.

    Attributes:
        backend: that of ``maker``.
        grad_memory: the memory of ``sinks``; there is none during the eager passes.
        sinks: the gradient sinks of each chunk.
        models: the state of each chunk's module that the graphs depend on.
        aliases: the leaves that replace each chunk's parameters during the session.
        bookkeeping: what the module of each chunk keeps, as `_make_room` finds it.
        warm_ups: measurements of the eager passes, by bank and chunk.
        plans: how backwards are captured, by bank and chunk.
        memories: the memory of each slot, which all banks share.
        slots: slots captured so far, in order.
        markers: what follows the gradients of each slot.
        saved: the tensors that each slot's forward keeps, by bank, chunk and slot.
        trial: what ``settings.limit`` began.
        held: see `GraphSet`.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        num_slots: Sequence[int],
        samples: Mapping[Hashable, Sequence[Call]],
        settings: SessionSettings,
        maker: GraphMaker,
    ) -> None:
        self.chunks, self.num_slots, self.samples = list(chunks), tuple(num_slots), samples
        self.settings, self.maker, self.backend = settings, maker, maker.backend
        self.backend.release_workspaces()  # and the cache: its blocks are too small for all sinks
        parameters = {id(p): p for chunk in chunks for p in chunk.parameters}
        self.grad_memory = GradMemory(parameters.values())
        self.sinks = tuple(GradientSinks(c.parameters, self.grad_memory) for c in chunks)
        self.grad_memory.set_aside()  # the passes of `_warm_up` need none
        self.models = tuple(map(ModelGuard, chunks))
        refuse_shared_parameters(chunks)
        stand_ins: dict[int, nn.Parameter] = {}
        self.aliases = tuple(ParameterAliases(c.module, c.parameters, stand_ins) for c in chunks)
        self.bookkeeping: tuple[Bookkeeping, ...] = ()
        self.warm_ups: dict[Hashable, list[WarmUp]] = {}
        self.plans: dict[Hashable, list[BackwardPlan]] = {}
        self.memories: dict[Hashable, SlotMemory] = {}
        self.slots: list[Slot] = []
        self.markers: dict[Slot, GradientMarker] = {}
        self.saved: dict[SlotKey, tuple[SavedTensor, ...]] = {}
        self.trial: Any = None
        self.held: object = None

    def variants(self) -> list[list[tuple[Hashable, int]]]:
        """Return banks and chunks in the order of capture.

        Each group has at most one variant of every slot. Its backwards free what its forwards keep
        before the next group is captured.
        """
        indices = range(len(self.chunks))
        if self.settings.shared_slots:
            return [[(key, c)] for key in self.samples for c in indices]
        return [[(key, c) for c in indices] for key in self.samples]

    @property
    def held_bytes(self) -> list[int]:
        """Return the bytes that a forward of each chunk holds, in its largest bank."""
        by_chunk = zip(*self.warm_ups.values(), strict=True)
        return [max(warm.held_bytes for warm in of_chunk) for of_chunk in by_chunk]

    def isolated(self, c: int) -> Isolated:
        """Return chunk ``c``, set aside from training."""
        return Isolated(self.chunks[c], self.sinks[c], self.aliases[c].leaves, self.maker)


def _run(
    chunks: Sequence[Chunk],
    num_slots: Sequence[int],
    samples: Mapping[Hashable, Sequence[Call]],
    settings: SessionSettings,
    maker: GraphMaker,
) -> GraphSet:
    """Run all phases of a session."""
    start = time.perf_counter()
    session = Session(chunks, num_slots, samples, settings, maker)
    try:
        with ExitStack() as stack:
            _enter(session, stack)
            _warm_up(session)
            _choose_slots(session)
            _make_room(session)
            for group in session.variants():
                # No comprehensions: their references outlive the frames of a failed session.
                for key, c in group:
                    for s in range(session.num_slots[c]):
                        slot = capture_slot(session, key, c, s)
                        if s == 0:
                            _test(session, slot)
                    if session.trial is not None:
                        session.trial.test(key, c)
            if session.trial is not None:
                session.trial.finish()
            _prove(session)
    except BaseException:
        for slot in session.slots:
            slot.release()
        raise
    session.backend.release_cached_memory()
    for model in session.models:
        model.take()
    return GraphSet(
        _banks(session),
        session.sinks,
        session.models,
        maker.pools,
        _report(session, (time.perf_counter() - start) * 1e3),
        session.markers,
        {
            (key, c): replace(warm, passes=(), in_slot=(), in_scratch=())
            for key, of in session.warm_ups.items()
            for c, warm in enumerate(of)
        },
        session.saved,
        session.held,
        session.trial.paged if session.trial is not None else frozenset(),
    )


def _enter(session: Session, stack: ExitStack) -> None:
    """Isolate the model, random state and memory from training until ``stack`` is closed."""
    backend, settings = session.backend, session.settings
    for chunk in session.chunks:
        stack.enter_context(restoring_parts(chunk))
    stack.enter_context(settings.host.preserving())
    stack.enter_context(backend.preserve_random_state(settings.host.generators()))
    if backend.device.type == "cuda":
        gc.collect()  # no other collection starts until the last graph is captured
        stack.enter_context(collector_paused())
    # All ranks enter the host's context together, so stop here if one has failed.
    settings.begin_part(None)
    # Cached memory serves neither another stream nor a pool. It is released before the host's
    # context, which may allocate, and again once all contexts are entered.
    backend.release_cached_memory()
    session.held = stack.enter_context(settings.host.capturing())
    for aliases in session.aliases:
        stack.enter_context(aliases.in_place())
    for sinks in session.sinks:
        stack.enter_context(sinks.cleared())
    backend.release_cached_memory()


def _warm_up(session: Session) -> None:
    """Run eager passes of every chunk in every bank on the capture stream."""
    settings = session.settings
    session.backend.take_workspaces()  # else a pass counts them as memory of a slot
    for key, calls in session.samples.items():
        measured = session.warm_ups[key] = []
        plans = session.plans[key] = []
        for c, (chunk, call) in enumerate(zip(session.chunks, calls, strict=True)):
            settings.begin_part(key)
            own, label = session.isolated(c), _label(session, chunk.label, key)
            warm = warm_up(own, call, label, settings.layers)
            plan = program_of(chunk).plan(own, call)
            warm = replace(warm, held_bytes=max(warm.held_bytes, plan.held_bytes))
            if plan.in_scratch is not None:
                warm = replace(warm, in_scratch=plan.in_scratch)
            measured.append(warm)
            plans.append(plan)
    settings.begin_part(None)


def _choose_slots(session: Session) -> None:
    """Take one slot for a chunk without a backward; share slots if that takes less memory."""
    if not session.settings.shared_slots:
        pairs = zip(session.chunks, session.num_slots, strict=True)
        session.num_slots = tuple(n if chunk.has_backward else 1 for chunk, n in pairs)
    if session.settings.limit is not None:
        session.trial = session.settings.limit(session)
    num_together, held_bytes = session.settings.num_together, session.held_bytes
    if num_together is None or session.settings.shared_slots:
        return
    separate_bytes = sum(map(mul, session.num_slots, held_bytes))
    if num_together * max(held_bytes) < separate_bytes:
        session.num_slots = (num_together,) * len(session.chunks)
        session.settings = replace(session.settings, shared_slots=True)


def _make_room(session: Session) -> None:
    """Refuse a session that cannot fit, and give the allocator's cache back to the device."""
    session.bookkeeping = tuple(map(Bookkeeping, session.chunks))
    backend = session.backend
    check_memory(
        session.chunks,
        session.num_slots,
        session.held_bytes,
        backend,
        are_shared=session.settings.shared_slots,
        gradient_bytes=session.grad_memory.num_bytes,
    )
    backend.release_cached_memory()
    session.grad_memory.restore()
    warm_ups = [warm for of_bank in session.warm_ups.values() for warm in of_bank]
    session.maker.pools.reserve_scratch([warm.in_scratch for warm in warm_ups])


def capture_slot(session: Session, key: Hashable, c: int, s: int) -> Slot:
    """Capture one variant of a slot."""
    with session.settings.host.preserving():  # on a CPU, captures run
        slot = _new_slot(session, key, c, s)
        _capture_backward(session, slot, _capture_forward(session, slot))
    return slot


def _capture_forward(session: Session, slot: Slot) -> Pass:
    """Capture the forward of a slot."""
    c = slot.chunk
    session.settings.begin_part(slot.bank)
    with session.bookkeeping[c].restoring():
        forward = capture_forward(slot, session.isolated(c), session.samples[slot.bank][c])
    session.slots.append(slot)
    saved = saved_tensors(forward.leaves, session.settings.layers)
    session.saved[slot.bank, c, slot.index] = tuple(replace(t, tensor=None) for t in saved)
    return forward


def _label(session: Session, label: str, key: Hashable) -> str:
    """Return the name of a chunk or slot in a bank."""
    return label if len(session.samples) == 1 else f"{label}, bank {key}"


def _new_slot(session: Session, key: Hashable, c: int, s: int) -> Slot:
    """Return the slot to capture into. Its first variant creates the memory of all variants."""
    shared_slots = session.settings.shared_slots
    label = f"{session.chunks[c].label} slot {s}"
    slot_id: Hashable = s if shared_slots else (c, s)
    if slot_id not in session.memories:
        chunks = range(len(session.chunks)) if shared_slots else (c,)
        warm_ups = [of_bank[i] for of_bank in session.warm_ups.values() for i in chunks]
        slot_bytes = max(warm.slot_bytes for warm in warm_ups)
        session.backend.release_cached_memory()
        session.memories[slot_id] = SlotMemory(
            slot_id,
            session.maker.pools.forward_pool(label, slot_bytes, [w.in_slot for w in warm_ups]),
            SlotStatics(session.maker.pools.static),
        )
    memory = replace(session.memories[slot_id])
    return Slot(c, s, _label(session, label, key), key, memory)


def _capture_backward(session: Session, slot: Slot, forward: Pass) -> None:
    """Capture the actions after a captured forward."""
    c, chunk = slot.chunk, session.chunks[slot.chunk]
    session.settings.begin_part(slot.bank)
    own = session.isolated(c)
    input_grads: list[torch.Tensor | None] = [None] * len(forward.inputs)
    if chunk.has_backward:
        marker = chunk.new_marker() if chunk.new_marker is not None else None
        if marker is not None:
            session.markers[slot] = marker
        plan = session.plans[slot.bank][c]
        with session.bookkeeping[c].restoring():
            forward.make_output_grads(slot)
            input_grads = program_of(chunk).capture_backward(slot, forward, own, plan, marker)
    finish_slot(slot, forward, own, input_grads)


def _test(session: Session, slot: Slot) -> None:
    """Replay a slot on the sampled call, and compare it with the eager passes.

    Raises:
        CaptureError: a tensor differs in all replays; the message names the first layer.
    """
    session.settings.begin_part(slot.bank)  # all ranks replay, or none
    what, layer = differing_replay(session, slot, lambda: slot)
    if what:
        raise wrong_replay(slot.label, what, layer)
    session.backend.release_cached_memory()


def differing_replay(
    session: Session,
    slot: Slot,
    go_on: Callable[[], Slot],
    fill: Callable[[], None] = lambda: None,
) -> tuple[str, str]:
    """Return what differs between replays of a slot and eager passes, and its layer; "" if nothing.

    Kernels that rarely repeat their bits may have repeated them in both passes. So a replay that
    differs on any rank is repeated on all: what two replays do not agree on is noise, too, and a
    tensor that one of them repeats is right.

    Args:
        session: the session.
        slot: the slot whose forward is replayed, after ``fill``.
        go_on: called next; returns the slot whose backward is replayed.
        fill: fills the slot's static inputs.
    """
    c, key = slot.chunk, slot.bank
    backend, host = session.backend, session.settings.host
    chunk, sinks, warm = session.chunks[c], session.sinks[c], session.warm_ups[key][c]
    replays: list[Measured] = []
    for number in range(1, _NUM_REPLAYS + 1):
        sinks.clear()
        with (
            backend.on_capture_stream(),
            backend.preserve_random_state(host.generators()),
            host.preserving(),
            restoring(writable(chunk, warm.written)),
        ):
            fill()
            slot.graphs[chunk.actions[0]].replay()
            drawn = backend.default_generator, *host.generators()
            measured = Measured.of(slot.outputs.leaves, chunk.buffers, drawn)
            if number == _NUM_REPLAYS:
                measured = measured.with_saved(session.saved[key, c, slot.index])
            other = go_on()
            for gradient in other.output_grads.tensors if other.output_grads is not None else ():
                fill_test_gradient(gradient)
            for graph in [*other.graphs.values()][1:]:
                graph.replay()
            trained = set(other.trained)
            sums = [sink if i in trained else None for i, sink in enumerate(sinks.buffers)]
            replays.append(measured.with_backward(other.input_grads.tensors, sums))
        noise = warm.noise.widened(replays)
        what, layer = difference(chunk, warm.passes, replays, noise)
        if not session.settings.any_rank(bool(what)):
            break
    if not what:
        session.warm_ups[key][c] = replace(warm, noise=noise)
    return what, layer


def _prove(session: Session) -> None:
    """Check the parameters' memory, and prove that slots do not overlap."""
    session.settings.begin_part(None)
    for aliases, chunk in zip(session.aliases, session.chunks, strict=True):
        aliases.check_memory(chunk.label)
    backend, slots = session.backend, [session.slots]
    slots += [[s for of in graphs.slots for s in of] for graphs in session.settings.others()]
    if not any(g.reads() for own in slots for s in own for g in s.graphs.values()):
        del slots[1:]  # only in what graphs read of others may two sessions conflict
    prove_disjoint([_footprint(s, backend, i) for i, own in enumerate(slots) for s in own])


def _banks(session: Session) -> dict[Hashable, Bank]:
    """Return the slots and signatures of every bank."""
    slots: dict[tuple[Hashable, int], list[Slot]] = {}
    for slot in session.slots:
        slots.setdefault((slot.bank, slot.chunk), []).append(slot)
    return {
        key: Bank(
            tuple(tuple(slots[key, c]) for c in range(len(session.chunks))),
            tuple(
                Signature(call, chunk.label)
                for call, chunk in zip(calls, session.chunks, strict=True)
            ),
            tuple(call.emptied() for call in calls),
        )
        for key, calls in session.samples.items()
    }


def _report(session: Session, duration_ms: float) -> CaptureReport:
    pools, slots = session.maker.pools, session.slots
    held_bytes: dict[Hashable, int] = {}
    for memory in (slot.memory for slot in slots):
        held_bytes[memory.slot_id] = max(held_bytes.get(memory.slot_id, 0), memory.live.num_bytes)
    return CaptureReport(
        num_slots=session.num_slots,
        shared_slots=session.settings.shared_slots,
        num_graphs=sum(len(slot.graphs) for slot in slots),
        slot_bytes=sum(pool.reserved_bytes for pool in pools.slot_pools),
        held_bytes=sum(held_bytes.values()),
        scratch_bytes=pools.scratch.reserved_bytes if pools.scratch else 0,
        static_bytes=_num_bytes([t for slot in slots for t in slot.loaded]),
        duration_ms=duration_ms,
        memsets_kept=session.backend.memsets_kept,
    )


def _footprint(slot: Slot, backend: GraphBackend, session: int) -> SlotFootprint:
    """Return the memory that a slot's graphs read and write, for the proof."""
    loaded, reads = AddressRanges(), AddressRanges()
    for tensor in slot.loaded:
        loaded = loaded | backend.storage_ranges(tensor)
    for graph in slot.graphs.values():
        reads = reads | graph.reads()
    writes = {graph.label: graph.writes() for graph in slot.graphs.values()}
    # Copies into static inputs before a replay are writes too.
    writes[f"{slot.label} (its inputs loaded)"] = loaded
    live, slot_id = slot.memory.live | loaded, slot.memory.slot_id
    return SlotFootprint(slot.label, live, writes, slot_id, reads, session)


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages of tensors: variants of a slot share them."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())
