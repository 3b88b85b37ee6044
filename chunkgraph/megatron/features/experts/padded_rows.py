"""What follows from a microbatch's padding alone: the same in every layer, so computed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from chunkgraph.megatron.core.access import private_names
from chunkgraph.megatron.core.backward_pass import is_in_backward

__all__ = ["PaddedRows", "RowsOfForward"]

_UTILS = "megatron.core.transformer.moe.moe_utils"


class PaddedRows:
    """The rows of a microbatch, some of which hold no token.

    Args:
        padding: bool [rows], True where a row holds no token.
    """

    def __init__(self, padding: torch.Tensor) -> None:
        self.padding = padding
        self._room: dict[tuple[int, int, float], torch.Tensor] = {}

    @cached_property
    def tokens(self) -> torch.Tensor:
        """True where a row holds a token."""
        return ~self.padding

    def room(self, num_experts: int, top_k: int, capacity_factor: float) -> torch.Tensor:
        """Which of an expert's places there are for these tokens: bool [most places], the first.

        As many as Megatron gives an expert for an input of the tokens alone; in all, those that it
        has for all rows.
        """
        key = (num_experts, top_k, capacity_factor)
        if key not in self._room:
            (get_capacity,) = private_names(_UTILS, "get_capacity")
            num_rows = self.padding.shape[0]
            most = min(get_capacity(num_rows * top_k, num_experts, capacity_factor), num_rows)
            # The same arithmetic as Megatron's, in the same precision.
            num_chosen = self.tokens.sum().double() * top_k
            capacity = torch.ceil(num_chosen / num_experts * capacity_factor)
            self._room[key] = torch.arange(most, device=self.padding.device) < capacity
        return self._room[key]


class RowsOfForward:
    """Gives the layers of one forward the same rows for the same padding."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], PaddedRows] | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward of a chunk: a graph reads its own, and nothing of another's."""
        before, self._found = self._found, {}
        try:
            yield
        finally:
            self._found = before

    def of(self, padding: torch.Tensor) -> PaddedRows:
        """The rows of a microbatch, bool [rows]; in a backward, and outside of a forward, anew.

        Also in inference mode, where a tensor does not tell whether it was written to.
        """
        if self._found is None or is_in_backward() or padding.is_inference():
            return PaddedRows(padding)
        # What is found is held, so that no other tensor takes its place in memory.
        key = (padding.data_ptr(), padding.shape, padding.stride(), padding._version)
        return self._found.setdefault(key, PaddedRows(padding))
