"""Whether a forward runs within a backward: what autograd says of it is private to torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["at_end_of_backward", "is_in_backward"]


def is_in_backward() -> bool:
    """Whether this thread is in a backward, whose forwards are computed anew."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call at the end of the backward that this thread is in, unless it raises; as FSDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
