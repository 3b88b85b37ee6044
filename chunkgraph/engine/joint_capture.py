"""A capture session of all ranks: they keep their graphs together, or none does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.decision import Agree
from chunkgraph.engine.failure import SessionWatch, agree_on_cause, forget_frames
from chunkgraph.engine.session import CapturedRank, SessionSettings, capture_session
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
    """

    captured: CapturedRank | None
    error: ChunkGraphError | None = None
    failed_here: bool = False
    is_told_here: bool = False


def capture_together(
    prepare: Callable[[], tuple[Sequence[Chunk], Mapping[Hashable, Sequence[Call]]]],
    num_slots: Sequence[int],
    backend: GraphBackend,
    settings: SessionSettings,
    watch: SessionWatch,
    agree: Agree,
) -> JointCapture:
    """Run `capture_session` and ask all ranks how theirs went; nothing is raised.

    Args:
        prepare: gives the chunks and the samples for `capture_session`.
        num_slots: see there, like the next two.
        backend: see there.
        settings: see there.
        watch: of this session.
        agree: all ranks come here together.
    """
    own: ChunkGraphError | None = None
    captured: CapturedRank | None = None
    try:
        chunks, samples = prepare()
        with watch.watching(settings) as watched:
            captured = capture_session(chunks, num_slots, samples, backend, watched)
    except Exception as error:  # noqa: BLE001
        # Whatever it was, the other ranks are about to ask how the session went.
        own = watch.explain(error)
        forget_frames(error)
    cause, is_own = agree_on_cause(agree, str(own) if own is not None else "")
    if not cause:
        return JointCapture(captured)
    failed_here = own is not None
    if captured is not None:
        for slot in (s for slots in captured.slots for s in slots):
            slot.release()
        captured = None
    backend.release_cached_memory()
    error_here = own or CaptureError(
        f"{watch.label}: captured, but another rank could not; all ranks dropped their graphs. "
        f"Its message:\n{cause}"
    )
    return JointCapture(None, error_here, failed_here, is_own)
