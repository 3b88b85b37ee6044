"""Whether a forward runs within a backward: what autograd says of it is private to torch."""

from __future__ import annotations

import torch

__all__ = ["is_in_backward"]


def is_in_backward() -> bool:
    """Whether this thread is in a backward, whose forwards are computed anew."""
    return bool(torch._C._current_graph_task_id() != -1)
