"""Tells when the last forward of a step was given to the device, long before the step ends there.

What only forwards decide, such as whether all tokens found room, can be sent to the host then. Who
waits for it waits while the device still runs backwards, and can give it the optimizer's work
before they end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["telling_last_forward"]


def telling_last_forward(
    kwargs: dict[str, Any],
    num_chunks: int,
    then: Callable[[], None],
    take_back: Callable[[], None],
) -> dict[str, Any]:
    """The keywords of a schedule, by which ``then`` is called behind the last forward of this rank.

    That is the last of one for each microbatch and model chunk. A schedule that has fewer never
    calls it, and one that has more calls ``take_back`` too.

    Args:
        kwargs: of the schedule; left as they are.
        num_chunks: model chunks of this rank.
        then: called once, in the order of the host.
        take_back: it was not the last forward.
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
            then()
        elif num_left == -1:
            take_back()
        return result

    return {**kwargs, "forward_step_func": counted}
