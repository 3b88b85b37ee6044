"""A capture session that failed: what is told, and how all ranks come to know one cause."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.session import SessionSettings
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.decide.reasons import Agree
from chunkgraph.engine.options import OnCapture
from chunkgraph.errors import CaptureError, ChunkGraphError
from chunkgraph.graphs import capture_failure

__all__ = ["SessionWatch", "agree_on_cause", "forget_frames"]

_BYTES_IN_A_NUMBER = 7  # of the 8 of an int64, so that none is negative
_ADVICE = "\n  To do:"


class SessionWatch:
    """Watches one capture session, to tell where it failed.

    Args:
        chunks: of the session.
        label: names the rank.

    Attributes:
        label: the same.
    """

    def __init__(self, chunks: Sequence[Chunk], label: str) -> None:
        self._chunks = tuple(chunks)
        self.label = label
        self._layers = LayerWatch()
        self._num_done = self._num_graphs = 0

    @contextmanager
    def watching(self, settings: SessionSettings) -> Iterator[SessionSettings]:
        """Gives the settings to capture with in this block."""
        with self._layers.watching(self._chunks):
            yield replace(settings, progress=self._counting(settings.progress))

    def explain(self, error: Exception) -> ChunkGraphError:
        """The error to report: with the layer, and what was done by then where memory ran out."""
        own = error
        if not isinstance(own, ChunkGraphError):
            own = capture_failure(self.label, error)
            own.__cause__ = error
        if not isinstance(own, CaptureError):
            return own
        facts = ""
        if self._layers.layer:
            facts += f"\n  in layer {self._layers.layer}"
        if isinstance(own.__cause__, torch.OutOfMemoryError):
            facts += (
                f"\n  {self._num_done} of {self._num_graphs or 'all'} graphs were captured by then"
            )
        what, advice, rest = str(own).partition(_ADVICE)
        told = type(own)(what + facts + advice + rest)
        told.__cause__ = own
        return told

    def _counting(self, progress: OnCapture | None) -> OnCapture:
        def count(num_done: int, num_graphs: int, free_bytes: int | None) -> None:
            self._num_done, self._num_graphs = num_done, num_graphs
            if progress is not None:
                progress(num_done, num_graphs, free_bytes)

        return count


def agree_on_cause(agree: Agree, own: str) -> tuple[str, bool]:
    """One cause for all ranks, though they can only agree on the largest of some numbers.

    Args:
        agree: see `Agree`; all ranks come here together.
        own: why this rank failed; "" if it did not.

    Returns:
        Why the session failed ("" if it did on no rank), and whether that is this rank's own.
    """
    text = own.encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") + 1 if own else 0
    (largest,) = agree([number])
    if not largest:
        return "", False
    is_own = number == largest
    (length,) = agree([len(text) if is_own else 0])
    padded = text.ljust(-(-length // _BYTES_IN_A_NUMBER) * _BYTES_IN_A_NUMBER, b"\0")
    mine = [
        int.from_bytes(padded[i : i + _BYTES_IN_A_NUMBER], "big")
        for i in range(0, -(-length // _BYTES_IN_A_NUMBER) * _BYTES_IN_A_NUMBER, _BYTES_IN_A_NUMBER)
    ]
    told = agree(mine if is_own else [0] * len(mine))
    data = b"".join(n.to_bytes(_BYTES_IN_A_NUMBER, "big") for n in told)
    return data[:length].decode(errors="replace"), is_own


def forget_frames(error: BaseException | None) -> None:
    """Drop what the frames of ``error`` and of its causes hold: a failed session's memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
