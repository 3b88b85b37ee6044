"""Refuse calls in contexts that affect eager operators but not replays."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from chunkgraph.errors import ReplayMismatchError

__all__ = ["check_surroundings", "saved_tensors_hooks"]


def saved_tensors_hooks() -> str:
    """Return what is wrong with the active hooks for saved tensors; "" if nothing is.

    torch's own hooks are harmless: those of checkpointing, and those that save tensors on the CPU.
    """
    hooks = _active_hooks(False)
    if hooks is None or getattr(hooks[0], "__module__", "") in _HARMLESS_HOOKS:
        return ""
    return (
        f"inside saved_tensors_hooks ({hooks[0]!r}), which a replay does not call: the tensors "
        "of its backward lie in the graphs. Call it outside of the hooks, or ask for an eager step "
        "(`step(eager=True)`)."
    )


def check_surroundings(label: str) -> None:
    """Refuse a call in a context that affects eager operators but not replays.

    Args:
        label: Label of the chunk, for errors.

    Raises:
        ReplayMismatchError: torch.func or forward-mode autograd is active.
    """
    if forward_ad._current_level >= 0 or _are_transforms_active():
        raise ReplayMismatchError(
            f"{label} is called under torch.func (grad, vmap, jvp) or forward-mode autograd, "
            "which replays do not support. Call the module itself there, or transform inside it."
        )


_are_transforms_active = torch._C._are_functorch_transforms_active
_active_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_HARMLESS_HOOKS = ("torch.utils.checkpoint", "torch.autograd.graph")
