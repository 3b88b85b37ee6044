"""A capture session of all ranks: they keep their graphs together, or none does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from chunkgraph.engine.capture.failure import SessionWatch, agree_on_cause, forget_frames
from chunkgraph.engine.capture.lockstep import Lockstep, StoppedElsewhere
from chunkgraph.engine.capture.session import (
    BeforeGraph,
    CapturedRank,
    SessionSettings,
    capture_session,
)
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.decide.reasons import Agree
from chunkgraph.engine.signature import Call
from chunkgraph.errors import CaptureError, ChunkGraphError
from chunkgraph.graphs import GraphBackend

__all__ = ["JointCapture", "capture_together"]


@dataclass(frozen=True)
class JointCapture:
    """How it went, on this rank.

    Attributes:
        captured: the rank's graphs; None if any rank failed.
        error: then, what to raise here: this rank's own error or one that tells the cause.
        failed_here: whether this rank's own session failed.
        is_told_here: whether the agreed cause is this rank's, so that it alone need warn of it.
        cause: the agreed cause, "" if no rank failed.
        failed_bank: place, among the banks, of the one that could not be captured; None where
            that was not because of one bank, or the ranks were not in lockstep.
    """

    captured: CapturedRank | None
    error: ChunkGraphError | None = None
    failed_here: bool = False
    is_told_here: bool = False
    cause: str = ""
    failed_bank: int | None = None


def capture_together(
    prepare: Callable[[], tuple[Sequence[Chunk], Mapping[Hashable, Sequence[Call]]]],
    num_slots: Sequence[int],
    backend: GraphBackend,
    settings: SessionSettings,
    watch: SessionWatch,
    agree: Agree,
    *,
    in_lockstep: Sequence[Hashable] = (),
) -> JointCapture:
    """Run `capture_session` and ask all ranks how theirs went; nothing is raised.

    Args:
        prepare: gives the chunks and the samples for `capture_session`.
        num_slots: see there, like the next two.
        backend: see there.
        settings: see there.
        watch: of this session.
        agree: all ranks come here together.
        in_lockstep: the banks, if ranks are to ask each other before every graph; see `Lockstep`.
    """
    own: ChunkGraphError | None = None
    lockstep = Lockstep(agree)
    captured: CapturedRank | None = None
    try:
        chunks, samples = prepare()
        if in_lockstep:
            lockstep.begin(None)
            settings = replace(settings, before_graph=_both(settings.before_graph, lockstep.begin))
        with watch.watching(settings) as watched:
            captured = capture_session(chunks, num_slots, samples, backend, watched)
        if in_lockstep:
            lockstep.finish()
    except StoppedElsewhere as stop:
        forget_frames(stop)
    except Exception as error:  # noqa: BLE001
        # Whatever it was, the other ranks are about to ask how the session went.
        own = watch.explain(error)
        forget_frames(error)
        if in_lockstep:
            lockstep.fail()
    cause, is_own = agree_on_cause(agree, str(own) if own is not None else "")
    if not cause:
        return JointCapture(captured)
    failed_here = own is not None
    failed_bank = None
    if in_lockstep:
        at = 0 if own is None or lockstep.bank is None else in_lockstep.index(lockstep.bank) + 1
        (place,) = agree([at])
        failed_bank = place - 1 if place else None
    how_far = "stopped capturing, since" if captured is None else "captured, but"
    if captured is not None:
        for slot in (s for slots in captured.slots for s in slots):
            slot.release()
        captured = None
    backend.release_cached_memory()
    error_here = own or CaptureError(
        f"{watch.label}: {how_far} another rank could not; all ranks dropped their graphs. "
        f"Its message:\n{cause}"
    )
    return JointCapture(None, error_here, failed_here, is_own, cause, failed_bank)


def _both(first: BeforeGraph, second: BeforeGraph) -> BeforeGraph:
    def call(bank: Hashable | None) -> None:
        first(bank)
        second(bank)

    return call
