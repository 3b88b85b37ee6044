"""Routers that balance the tokens of a microbatch over the ranks that share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["follow_in_router"]


def follow_in_router(router: Any) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """Make a router balance the tokens of a microbatch over all ranks that share it.

    Megatron's routers count the tokens of an expert over the model's tensor- and context-parallel
    ranks. This one counts over the microbatch's ranks, for the microbatch's losses. A microbatch of
    context-parallel size C weighs C times as much as one of size 1 in gradients and metrics, since
    it has C times the rows; Megatron does the same with a static size. The z-loss stays a mean over
    the rank's tokens, and the global loss is over all ranks anyway.

    Args:
        router: a ``TopKRouter`` of a model without static context parallelism, so that its own
            group consists of its tensor-parallel ranks.

    Returns:
        A function that sets the group of the next call (tensor-parallel ranks included; None: the
        router's own), and a function that undoes it all.
    """
    own = router.tp_cp_group
    attach, z_loss = router.attach_and_log_load_balancing_loss, router.apply_z_loss

    def set_group(group: Any) -> None:
        router.tp_cp_group = own if group is None else group

    def attach_share(
        activation: Any, coefficient: Any, loss: Any, name: str, group: Any, *args: Any, **more: Any
    ) -> Any:
        current = router.tp_cp_group
        if group is current and current is not own:
            # Metrics are reduced after the step, when this microbatch's group is unknown.
            loss, group = loss * (current.size() // own.size()), own
        router.tp_cp_group = own
        try:
            return attach(activation, coefficient, loss, name, group, *args, **more)
        finally:
            router.tp_cp_group = current

    def apply_z_loss(*args: Any, **kwargs: Any) -> Any:
        current, router.tp_cp_group = router.tp_cp_group, own
        try:
            return z_loss(*args, **kwargs)
        finally:
            router.tp_cp_group = current

    router.attach_and_log_load_balancing_loss = attach_share
    router.apply_z_loss = apply_z_loss

    def undo() -> None:
        del router.attach_and_log_load_balancing_loss, router.apply_z_loss
        router.tp_cp_group = own

    return set_group, undo
