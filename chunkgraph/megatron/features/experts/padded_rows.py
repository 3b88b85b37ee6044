"""Values that depend only on a microbatch's padding, computed once for all layers."""

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
        padding: True for rows without a token, bool, shape [rows].
    """

    def __init__(self, padding: torch.Tensor) -> None:
        self.padding = padding
        self._room: dict[tuple[int, int, float], torch.Tensor] = {}

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Return True for rows with a token, bool, shape [rows]."""
        return ~self.padding

    def room(self, num_experts: int, top_k: int, capacity_factor: float) -> torch.Tensor:
        """Return the usable places of an expert, bool, shape [places for all rows].

        The first places are usable, as many as Megatron gives an expert for an input of only these
        tokens.
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
    """Shares `PaddedRows` of the same padding between the layers of one forward."""

    def __init__(self) -> None:
        self._cache: dict[tuple[object, ...], PaddedRows] | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround the forward of a chunk, so that a graph never reads another graph's tensors."""
        outer, self._cache = self._cache, {}
        try:
            yield
        finally:
            self._cache = outer

    def of(self, padding: torch.Tensor) -> PaddedRows:
        """Return the rows of a microbatch; a new object in a backward and outside of a forward.

        Inference mode returns a new object too, as its tensors have no version counter.

        Args:
            padding: True for rows without a token, bool, shape [rows].
        """
        if self._cache is None or is_in_backward() or padding.is_inference():
            return PaddedRows(padding)
        # The cache keeps the tensor alive, so no other tensor can take its address.
        key = (padding.data_ptr(), padding.shape, padding.stride(), padding._version)
        return self._cache.setdefault(key, PaddedRows(padding))
