"""Megatron's Sinkhorn routing with a bounded number of rounds, without host reads.

Megatron's function iterates until an error that it reads on the host is small. Here a fixed number
of rounds runs; rounds after Megatron's last one change nothing, so results have the same bits. A
flag on the device reports whether more rounds were needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names

__all__ = ["BoundedSinkhorn"]

_ROUTER = "megatron.core.transformer.moe.router"
_FEWEST_ROUNDS = 16
_TINY = 0.00000001


class BoundedSinkhorn:
    """Replacement for Megatron's function.

    Args:
        note: Callback with the flag of needing more rounds, a scalar on the device.

    Attributes:
        num_rounds: Number of rounds.
    """

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        self.num_rounds = _FEWEST_ROUNDS
        self._note = note

    def install(self) -> Callable[[], None]:
        """Make routers call this object; return the undo function."""
        private_names(_ROUTER, "sinkhorn")
        return patch_attributes(import_megatron(_ROUTER), {"sinkhorn": self})

    def __call__(self, cost: torch.Tensor, tol: float = 0.0001) -> torch.Tensor:
        """Return the probabilities of routing, shape [tokens, experts].

        Args:
            cost: Costs, of the same shape.
            tol: Error at which Megatron's loop ends.
        """
        cost = torch.exp(cost)
        rows = torch.ones(cost.size(0), device=cost.device, dtype=cost.dtype)
        columns = torch.ones(cost.size(1), device=cost.device, dtype=cost.dtype)
        is_done = torch.zeros((), dtype=torch.bool, device=cost.device)
        for _ in range(self.num_rounds):
            of_rows = (1 / rows.size(0)) * 1 / (torch.sum(columns * cost, 1) + _TINY)
            of_columns = torch.sum(of_rows.unsqueeze(1) * cost, 0) + _TINY
            of_columns = (1 / columns.size(0)) * 1 / of_columns
            error = torch.mean(torch.abs(columns - of_columns))
            rows = torch.where(is_done, rows, of_rows)
            columns = torch.where(is_done, columns, of_columns)
            is_done = is_done | ~(error > tol)  # an error of NaN ends Megatron's loop too
        self._note(~is_done)
        return columns * cost * rows.unsqueeze(1)
