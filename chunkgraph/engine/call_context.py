"""Refuse calls in contexts that change eager work, but do not reach the graphs of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from chunkgraph.errors import CaptureError, ReplayMismatchError

__all__ = ["Error", "active_modes", "is_of_library", "refuse_contexts"]

Error = type[CaptureError] | type[ReplayMismatchError]
"""The class of an error, at a capture or at a replay."""

_LIBRARIES = frozenset({"chunkgraph", "megatron", "torch", "transformer_engine"})


def refuse_contexts(label: str, error: Error, modes: Sequence[str]) -> None:
    """Raise ``error`` in contexts that change eager work, but not replays.

    Args:
        label: label of the chunk.
        error: class of the error.
        modes: kinds of torch's dispatch and function modes that may be active; see `active_modes`.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    found = ["anomaly detection"] if torch.is_anomaly_enabled() else []
    found += ["saved_tensors_hooks"] if hooks is not None and not is_of_library(hooks[0]) else []
    found += [f"{m}, which was not active at the capture" for m in active_modes() if m not in modes]
    if found:
        raise error(
            f"{label} is called under {found[0]}, and a replay runs no Python, so it would have no "
            "effect. Leave its block, or ask for an eager step (`step(eager=True)`)."
        )


def active_modes() -> list[str]:
    """Return the kinds of torch's dispatch and function modes that are active."""
    modes = (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack())
    return [type(mode).__qualname__ for mode in modes]


def is_of_library(hook: Any) -> bool:
    """Return whether a hook belongs to a library whose hooks come and go around steps."""
    function = getattr(hook, "func", hook)  # of a partial
    owner = getattr(function, "__module__", None) or type(function).__module__
    return str(owner).partition(".")[0] in _LIBRARIES
