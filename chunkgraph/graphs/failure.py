"""Errors of captures, which name the innermost line of the user's code."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
from torch._ops import OpOverload

from chunkgraph.errors import CaptureError, IllegalOperationError

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MACHINERY = (_TORCH, *(os.path.join(_OURS, name, "") for name in ("graphs", "megatron/cpu")), "<")
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


@functools.cache  # called for every captured operator; the program has few files
def _is_users(file: str) -> bool:
    return not file.startswith((*_MACHINERY, *_CAPTURING)) and not file.endswith("contextlib.py")


@functools.cache
def _shown(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}, in {code.co_name}" + (f": {text}" if text else "")


def current_location() -> str | None:
    """Return the user's line of the running call, with its file; None inside a C++ backward.

    Frames of torch and of the graph backend are skipped. The search ends at the engine, since the
    caller of a capture session does not cause the events in it.
    """
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.startswith(_CAPTURING):
            return None
        if _is_users(file):
            return _shown(frame.f_code, line)
    return None


def _location_of(error: BaseException) -> str | None:
    """Return the user's innermost line in an exception's traceback, or None."""
    lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [(code, line) for code, line in lines if _is_users(code.co_filename)]
    return _shown(*users[-1]) if users else None


def capture_failure(label: str, error: Exception) -> CaptureError:
    """Return the error for a capture that ``error`` ended; it names the user's line, if any."""
    where = _location_of(error)
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
