"""Ask autograd about the running backward, through a name that is private to torch."""

from __future__ import annotations

import torch

__all__ = ["is_in_backward"]


def is_in_backward() -> bool:
    """Return whether this thread runs a backward, in which a forward is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
