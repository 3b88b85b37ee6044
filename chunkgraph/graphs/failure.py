"""Errors of captures, which name the innermost line of the user's code."""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch._ops import OpOverload

from chunkgraph.errors import CaptureError, IllegalOperationError

__all__ = [
    "SourceLocation",
    "capture_failure",
    "check_backward",
    "current_location",
    "illegal_operation",
    "is_decided_by_node",
    "location_of",
]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MACHINERY = (_TORCH, _OURS + "graphs" + os.sep, "<")
_CAPTURING = (_OURS + "engine" + os.sep, _OURS + "memory" + os.sep)

# Backwards that read values on the host. Under a dispatch mode torch uses other formulas with other
# bits: for each node, the operator that only this other formula runs (None: any operator).
_READING_BACKWARDS: dict[str, OpOverload | None] = {
    "ProdBackward0": None,
    "ProdBackward1": None,
    # The gradient of the number that is filled in.
    "MaskedFillBackward1": torch.ops.aten.where.self,
}

_KEEP_ON_DEVICE = (
    "keep the value on the device (torch.where, masks of fixed shape), move the line out of the "
    "chunk, or compute it on the host before the step."
)


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


def capture_failure(label: str, error: Exception) -> CaptureError:
    """Return the error for a capture that ``error`` ended; it names the user's line, if any."""
    where = location_of(error)
    place = f"\n  at {where}" if where else ""
    first_line = next(iter(str(error).splitlines()), "")
    if isinstance(error, torch.OutOfMemoryError):
        return CaptureError(
            f"Capturing {label} ran out of memory: {first_line}{place}\n"
            "  To do: reduce the memory of the slots (a smaller microbatch or sequence, selective "
            "recompute, fewer slots if the number of microbatches is bounded), or train with "
            "fewer layers per rank; `chunkgraph plan CONFIG` estimates what each rank needs."
        )
    return CaptureError(
        f"Capturing {label} failed: {type(error).__name__}: {first_line}{place}\n"
        "  To do: move the line out of the chunk, or replace it by work on the device (no host "
        "reads, no data-dependent shapes, no synchronization)."
    )


def illegal_operation(
    what: str, why: str, label: str, remedy: str = _KEEP_ON_DEVICE
) -> IllegalOperationError:
    """Return the error for an operator that a graph cannot hold, with the user's line."""
    where = current_location()
    node = torch._C._current_autograd_node()
    place = f"\n  at {where}" if where else ""
    if node is not None:
        place += f"\n  in the backward of {node.name()}"
    return IllegalOperationError(
        f"{what} {why}, so the graph cannot hold it; capturing {label}.{place}\n  To do: {remedy}"
    )


def check_backward(func: OpOverload, args: Sequence[Any], label: str) -> None:
    """Refuse backwards that read values on the host, which they avoid only under a dispatch mode.

    Raises:
        IllegalOperationError: This is such a backward; the message names it.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        return
    name = node.name()
    if name not in _READING_BACKWARDS or _READING_BACKWARDS[name] not in (None, func):
        return
    if any(isinstance(a, torch.Tensor) and a.numel() > 1 for a in args):
        raise illegal_operation(
            name.removesuffix("0").removesuffix("1"), "reads device values on the host", label
        )


def is_decided_by_node(node_name: str) -> bool:
    """Return whether captures check the operators of this autograd node in a special way."""
    return node_name in _READING_BACKWARDS
