"""Explain a failed capture session, and report one cause on all ranks."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.session import SessionSettings
from chunkgraph.engine.chunk import Chunk, OnCapture
from chunkgraph.engine.decide.reasons import Agree
from chunkgraph.errors import CaptureError, ChunkGraphError
from chunkgraph.graphs import capture_failure

__all__ = ["SessionWatch", "agree_on_cause", "forget_frames"]

_BYTES_IN_A_NUMBER = 7  # of the 8 of an int64, so that none is negative
_ADVICE = "\n  To do:"


class SessionWatch:
    """Follow one capture session, to report where it failed.

    Args:
        chunks: the chunks of the session.
        label: the rank's name in errors.

    Attributes:
        label: as passed.
    """

    def __init__(self, chunks: Sequence[Chunk], label: str) -> None:
        self._chunks = tuple(chunks)
        self.label = label
        self._layers = LayerWatch()
        self._num_done = self._num_graphs = 0

    @contextmanager
    def watching(self, settings: SessionSettings) -> Iterator[SessionSettings]:
        """Yield the settings to capture with in this block."""
        with self._layers.watching(self._chunks):
            yield replace(settings, progress=self._counting(settings.progress), layers=self._layers)

    def explain(self, error: Exception) -> ChunkGraphError:
        """Return the error to report, with the layer and, out of memory, the graphs captured."""
        failure = error
        if not isinstance(failure, ChunkGraphError):
            failure = capture_failure(self.label, error)
            failure.__cause__ = error
        if not isinstance(failure, CaptureError):
            return failure
        facts = ""
        if self._layers.layer:
            facts += f"\n  in layer {self._layers.layer}"
        if isinstance(failure.__cause__, torch.OutOfMemoryError):
            facts += (
                f"\n  {self._num_done} of {self._num_graphs or 'all'} graphs were captured by then"
            )
        what, advice, rest = str(failure).partition(_ADVICE)
        report = type(failure)(what + facts + advice + rest)
        report.__cause__ = failure
        return report

    def _counting(self, progress: OnCapture | None) -> OnCapture:
        def count(num_done: int, num_graphs: int, free_bytes: int | None) -> None:
            self._num_done, self._num_graphs = num_done, num_graphs
            if progress is not None:
                progress(num_done, num_graphs, free_bytes)

        return count


def agree_on_cause(agree: Agree, cause: str) -> tuple[str, bool]:
    """Choose one cause for all ranks, although they can only exchange maxima of numbers.

    Args:
        agree: see `Agree`; all ranks call it together.
        cause: why this rank failed; "" if it did not.

    Returns:
        Why the session failed ("" if no rank failed), and whether that is this rank's cause.
    """
    text = cause.encode()
    digest = hashlib.blake2b(text, digest_size=7).digest()
    number = int.from_bytes(digest, "big") + 1 if cause else 0
    (largest,) = agree([number])
    if not largest:
        return "", False
    is_own = number == largest
    (length,) = agree([len(text) if is_own else 0])
    padded = text.ljust(-(-length // _BYTES_IN_A_NUMBER) * _BYTES_IN_A_NUMBER, b"\0")
    numbers = [
        int.from_bytes(padded[i : i + _BYTES_IN_A_NUMBER], "big")
        for i in range(0, -(-length // _BYTES_IN_A_NUMBER) * _BYTES_IN_A_NUMBER, _BYTES_IN_A_NUMBER)
    ]
    numbers = agree(numbers if is_own else [0] * len(numbers))
    data = b"".join(n.to_bytes(_BYTES_IN_A_NUMBER, "big") for n in numbers)
    return data[:length].decode(errors="replace"), is_own


def forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and its causes, which hold a failed session's memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
