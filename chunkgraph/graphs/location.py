"""Find the line of user code that caused an event: the innermost frame of the user's code."""

from __future__ import annotations

import functools
import linecache
import os
import sys
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch

__all__ = ["SourceLocation", "current_location", "location_of"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MACHINERY = (_TORCH, _OURS + "graphs" + os.sep, "<")
_CAPTURING = (_OURS + "engine" + os.sep, _OURS + "memory" + os.sep)


@dataclass(frozen=True)
class SourceLocation:
    """A line of source: absolute file, 1-based line, function name and the line's text."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        shown = f"{self.file}:{self.line}, in {self.function}"
        return f"{shown}: {self.text}" if self.text else shown


@functools.cache  # called for every captured operator; the program has few files
def _is_users(file: str) -> bool:
    return not file.startswith((*_MACHINERY, *_CAPTURING)) and not file.endswith("contextlib.py")


@functools.cache
def _make(file: str, line: int, function: str) -> SourceLocation:
    return SourceLocation(file, line, function, linecache.getline(file, line).strip())


def current_location() -> SourceLocation | None:
    """Return the innermost user frame of the running call; None inside a C++ backward.

    Frames of torch and of the graph backend are skipped. The search ends at the engine, since the
    caller of a capture session does not cause the events in it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_CAPTURING):
            return None
        if _is_users(file):
            return _make(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def location_of(error: BaseException) -> SourceLocation | None:
    """Return the innermost user frame of an exception's traceback, or None."""
    location: SourceLocation | None = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_users(code.co_filename):
            location = _make(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return location
