"""Notify when a step's last forward is queued on the device, long before the step ends there.

Results that depend only on forwards, such as whether all tokens found room, can then be copied to
the host. The host waits for them while the device still runs backwards, and can queue the
optimizer's work before the backwards end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["notify_after_last_forward"]


def notify_after_last_forward(
    kwargs: dict[str, Any],
    num_chunks: int,
    done: Callable[[], None],
    resumed: Callable[[], None],
) -> dict[str, Any]:
    """Return a schedule's keywords that make it call ``done`` after this rank's last forward.

    A rank is expected to run one forward for each microbatch and model chunk. A schedule with
    fewer never calls ``done``; one with more also calls ``resumed``.

    Args:
        kwargs: Keywords of the schedule; not modified.
        num_chunks: Number of model chunks of this rank.
        done: Callback on the host after the last expected forward is queued.
        resumed: Callback after the first forward that follows.
    """
    forward_step = kwargs.get("forward_step_func")
    if forward_step is None:
        return kwargs
    num_left = kwargs["num_microbatches"] * num_chunks

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal num_left
        result = forward_step(*args, **more)
        num_left -= 1
        if num_left == 0:
            done()
        elif num_left == -1:
            resumed()
        return result

    return {**kwargs, "forward_step_func": counted}
