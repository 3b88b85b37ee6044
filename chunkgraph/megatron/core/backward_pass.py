"""Ask autograd about the running backward, through names that are private to torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["at_end_of_backward", "is_in_backward"]


def is_in_backward() -> bool:
    """Return whether this thread runs a backward, in which a forward is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of this thread's backward, unless the backward raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
