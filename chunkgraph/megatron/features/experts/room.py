"""The room of experts for tokens or rows, and counts on the device of what they lack and need.

Experts with a capacity have the user's factor; after a lack of room, the load of the step that ran
again. Rows between ranks have the heaviest load of the eager steps so far, at least the user's
budget (``moe_expert_rank_capacity_factor``). With all experts on one rank their number is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from chunkgraph.megatron.core.capturing import is_in_backward
from chunkgraph.megatron.rules.experts import balances_by, uses_dropless

LOAD_OF = 1 << 20
"""Unit of loads: integers per 2^20 tokens, because ranks agree on integers."""
_SHY = 1 - 1e-9
"""Megatron rounds an expert's rows up: a product with an upward rounding error would give one row
more than there are tokens, which the router cannot fill."""
_CAPACITY_MARGIN = 0.05
"""Experts with a capacity compute their whole room, used or not."""
_MARGIN = 0.2
"""Additional room, as a share of the heaviest load."""
_MOST_DOUBLED = 2
_ALIGNED_ROWS = 8


def factor_for_all(num_experts: int, top_k: int) -> float:
    """Return the capacity factor with which an expert has room for exactly all tokens.

    It holds up to a billion tokens. ``num_experts / top_k`` itself gives a row too many for some
    numbers, such as 6 of 160 experts and 448 tokens.
    """
    return num_experts / top_k * _SHY


class Room:
    """The room of a model's experts in graphs; the same on all ranks.

    With a capacity it is the capacity factor. Without one it is the rows per token of a rank, or of
    a piece for one; there is room for all outside of captures and before a load is known.

    Args:
        config: Megatron's config.

    Attributes:
        most: Room for all.
        is_measured: Whether eager steps measure the room: ranks exchange rows, without a budget.
        is_limited: Whether passes have this room only, as in captures.
        lacking: Names of the counted events, in the plural; "" if no dropless expert lacks room.
    """

    def __init__(self, config: Any) -> None:
        self.is_limited = self.is_measured = False
        self._heaviest = 0  # of any rank
        self._num_grown = 0
        self._margin = _MARGIN
        self._budget, self.most = 0.0, math.inf
        if not uses_dropless(config):
            self._margin = _CAPACITY_MARGIN
            self._budget = config.moe_expert_capacity_factor
            self.most = factor_for_all(config.num_moe_experts, config.moe_router_topk)
            self.lacking = "tokens without room at an expert"
            return
        events = []
        # With all experts on one rank a budget has no meaning, and nothing would report its lack.
        if (getattr(config, "expert_model_parallel_size", None) or 1) > 1:
            events.append("dispatches without room for all rows")
            budget = getattr(config, "moe_expert_rank_capacity_factor", None) or 0.0
            self._budget = budget * config.moe_router_topk
            self.is_measured = not budget
        if balances_by("sinkhorn", config):
            events.append("routers without enough rounds of Sinkhorn")
        self.lacking = " or ".join(events)

    @property
    def factor(self) -> float:
        """Return the current room, infinite for all rows."""
        doubled = 2 ** min(self._num_grown, _MOST_DOUBLED)
        measured = self._heaviest / LOAD_OF * (1 + self._margin * doubled)
        return min(max(self._budget, measured) or math.inf, self.most)

    def rows(self, num_tokens: int, most: int) -> int:
        """Return the room for a microbatch of ``num_tokens``, at most ``most`` rows."""
        if not self.is_limited:
            return most
        rows = int(min(num_tokens * self.factor, most)) + 1
        return min(most, rows + -rows % _ALIGNED_ROWS)

    def add_load(self, load: int) -> None:
        """Give the next capture room for ``load``, a room times `LOAD_OF`, plus the margin."""
        self._heaviest = max(self._heaviest, load)

    def give(self, load: int) -> None:
        """Make room for ``load``; double the margin, as captures are rare, and loads drift."""
        self.add_load(load)
        self._num_grown += 1


class RowCounts:
    """What the experts of one rank lack and need.

    Every step copies the counts to the host after the last forward (after all kernels if experts
    are recomputed). Nothing waits for the copy: `by_layer` returns what has arrived of it. The
    counts only grow, so one of a copy in flight is as valid as the one that it replaces.

    Args:
        layers: Layer numbers.
        device: Device of the counts.

    Attributes:
        layers: The layer numbers.
        total: Lack of room by layer, shape [layers], int64, on the device; it only grows.
        is_recomputed: Whether a count ever happened in a backward.
        measures: Whether the current step runs again, with room for all, to measure its load.
    """

    def __init__(self, layers: Sequence[int], device: torch.device) -> None:
        self.layers = tuple(layers)
        self.total = torch.zeros(len(self.layers), dtype=torch.int64, device=device)
        self.is_recomputed = False
        self.measures = False
        self._heaviest: torch.Tensor | None = None
        is_cuda = self.total.is_cuda
        shape = self.total.shape
        self._host = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None

    def add(self, index: int, flags: torch.Tensor) -> None:
        """Count the nonzero elements of ``flags``, of any shape, bool or integer, in a layer."""
        if is_in_backward():
            self.is_recomputed = True
        with torch.no_grad():
            flags = flags if flags.dtype is torch.bool else flags != 0
            self.total[index].add_(flags.sum() if flags.numel() > 1 else flags.view(()))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure an eager step in which all tokens have room; discard an earlier load."""
        self._heaviest, self.measures = None, True
        try:
            yield
        finally:
            self.measures = False

    def add_load(self, num_tokens: int | torch.Tensor, demand: torch.Tensor) -> None:
        """Record the load of a microbatch.

        Args:
            num_tokens: Tokens of the microbatch on this rank.
            demand: Most tokens or rows of any one expert or rank, a scalar; its device must be the
                same in every call.
        """
        at_least_one = torch.as_tensor(num_tokens, device=demand.device).clamp(min=1)
        load = -(-demand.to(torch.int64) * LOAD_OF // at_least_one)
        self._heaviest = load if self._heaviest is None else torch.maximum(self._heaviest, load)

    def take_load(self) -> int:
        """Return the heaviest load of a microbatch per `LOAD_OF` tokens, rounded up, and reset it.

        Waits for the device.
        """
        most, self._heaviest = self._heaviest, None
        return 0 if most is None else int(most)

    def send(self) -> None:
        """Start a copy of the counts to the host, on the current stream."""
        self._host.copy_(self.total, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def by_layer(self, *, wait: bool = False) -> dict[int, int]:
        """Return, by layer number, how often a token had no room so far on this rank.

        Args:
            wait: Wait for the device, so that the last step is included.
        """
        if wait and self._event is not None:
            self._event.synchronize()
        totals: dict[int, int] = {}
        for layer, count in zip(self.layers, self._host.tolist(), strict=True):
            totals[layer] = totals.get(layer, 0) + count
        return totals
