"""Run work on indices without the checks and sorts of torch's deterministic algorithms.

These repeat their bits by sorting the indices of each scatter, in 10 to 30 small kernels: a third
of those of a dropless layer's backward. Here no index occurs twice, or sums keep the order of the
rows, so that the same bits need one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names

_ROUTER = "megatron.core.transformer.moe.router"
_ROUTING = "topk_routing_with_score_function"


def take_rows(
    rows: torch.Tensor, places: torch.Tensor, *, are_reversed: bool = False
) -> torch.Tensor:
    """Return ``rows`` at ``places``, which are all inside, with gradients.

    Gradients are added as by `sum_rows`.
    """
    taken: torch.Tensor = _Rows.apply(rows, places, None, are_reversed)
    return taken


def sum_rows(
    rows: torch.Tensor, places: torch.Tensor, num_rows: int, *, are_reversed: bool = False
) -> torch.Tensor:
    """Return ``num_rows`` rows, each the sum of those that name it, with gradients.

    Args:
        rows: Rows, shape [n, ...].
        places: Index of the sum to which a row is added, shape [n], all inside.
        num_rows: Number of sums.
        are_reversed: Add the last row first, if the sums have an order at all.
    """
    summed: torch.Tensor = _Rows.apply(rows, places, num_rows, are_reversed)
    return summed


class _Rows(torch.autograd.Function):
    """Takes the rows at ``places``; or, of ``num_sums`` sums, adds each row to the one it names."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, places: torch.Tensor, num_sums: int | None, are_reversed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num_sums = rows.shape[0] if num_sums is None else None
        ctx.are_reversed = are_reversed
        return _taken_or_summed(rows, places, num_sums, are_reversed)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return _taken_or_summed(grads, places, ctx.num_sums, ctx.are_reversed), None, None, None


def _taken_or_summed(
    rows: torch.Tensor, places: torch.Tensor, num_sums: int | None, are_reversed: bool
) -> torch.Tensor:
    if num_sums is None:
        return rows.index_select(0, places)
    sums = rows.new_zeros(num_sums, *rows.shape[1:])
    is_ordered = torch.are_deterministic_algorithms_enabled()
    if are_reversed and (is_ordered or not rows.is_cuda):
        rows, places = rows.flip(0), places.flip(0)
    if rows.is_cuda and is_ordered:
        # The kernel of a deterministic index_add_, without its copy of the rows and its checks of
        # the indices, which are seven kernels.
        unsafe: Any = torch.ops.aten._index_put_impl_
        unsafe(sums, [places], rows, accumulate=True, unsafe=True)
        return sums
    return sums.index_add_(0, places, rows)


def take_once(values: torch.Tensor, places: torch.Tensor, are_taken: torch.Tensor) -> torch.Tensor:
    """Return ``values`` [n] at ``places`` in order, with gradients.

    Args:
        values: Values, shape [n].
        places: Indices, shape [rows]. Those after the last value that is taken may be any, and give
            no gradient.
        are_taken: Whether each value is taken, shape [n], bool.
    """
    taken: torch.Tensor = _TakenOnce.apply(values, places, are_taken)
    return taken


class _TakenOnce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, places: torch.Tensor, are_taken: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(are_taken)
        return values.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (are_taken,) = ctx.saved_tensors
        return grads.new_zeros(are_taken.shape).masked_scatter_(are_taken, grads), None, None


def scattered_routes() -> Callable[[], None]:
    """Let routers scatter the chosen probabilities; return the undo function.

    No token chooses an expert twice, so a scatter has one result.
    """
    (eager,) = private_names(_ROUTER, _ROUTING)

    def routing(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.are_deterministic_algorithms_enabled():
            return eager(logits, *args, **kwargs)
        is_grad_enabled = torch.is_grad_enabled()
        return _Scattered.apply(logits, is_grad_enabled, lambda own: eager(own, *args, **kwargs))

    return patch_attributes(import_megatron(_ROUTER), {_ROUTING: routing})


class _Scattered(torch.autograd.Function):
    """Runs a function of logits, and its backward, without deterministic algorithms."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        is_grad_enabled: bool,
        route: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, ...]:
        # Megatron also chooses its kernel by whether gradients are enabled.
        with _without_determinism(), torch.set_grad_enabled(is_grad_enabled):
            ctx.logits = logits.detach().requires_grad_(logits.requires_grad)
            probs, *others = route(ctx.logits)
        ctx.probs = probs
        ctx.mark_non_differentiable(*others)
        return (probs.detach(), *others)

    @staticmethod
    def backward(ctx: Any, of_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None, None]:
        with _without_determinism():
            (grads,) = torch.autograd.grad(ctx.probs, ctx.logits, of_probs, retain_graph=True)
        return grads, None, None


@contextmanager
def _without_determinism() -> Iterator[None]:
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
