"""Place rows in buffers of fixed size; all positions are computed on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from chunkgraph.megatron.features.experts.unique_indices import sum_rows, take_once, take_rows


@dataclass(frozen=True)
class DeviceSplits:
    """Replacement for Megatron's ``tokens_per_expert`` on the device.

    Attributes:
        ends: End of each local expert's rows, shape [experts], int32, on the device.
        are_reversed: Whether the last expert comes first.
    """

    ends: torch.Tensor
    are_reversed: bool = False
    _offsets: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def tolist(self) -> DeviceSplits:
        """Return this object: Megatron asks for a list, but only passes it on."""
        return self

    def sum(self) -> torch.Tensor:
        """Return the number of rows in use, a scalar on the device."""
        return self.ends[-1]

    @cached_property
    def counts(self) -> torch.Tensor:
        """Number of rows of each expert, shape [experts], int64."""
        return self._begins.diff()

    def offsets(self, width: int) -> torch.Tensor:
        """Return the first element of each expert in rows of ``width`` elements, and the end.

        Returns:
            Tensor of shape [experts + 1], int64. Calls with one width share it.
        """
        if width not in self._offsets:
            self._offsets[width] = self._begins * width
        return self._offsets[width]

    @cached_property
    def _begins(self) -> torch.Tensor:
        return torch.nn.functional.pad(self.ends.long(), (1, 0))


@dataclass(frozen=True)
class ChosenRows:
    """Tokens sorted by their chosen expert, in a buffer of ``num_rows`` rows.

    Attributes:
        pairs: Index of the row's (expert, token) pair in the transposed map, experts first, shape
            [num_rows]; unused rows name all tokens in turn, as torch's deterministic kernels add
            the rows of one token one after the other.
        tokens: Index of the row's token, shape [num_rows].
        has_row: Whether each pair of the transposed map has a row, flat, bool.
        splits: Rows of each expert.
        unused: True for rows without a pair, shape [num_rows]; None if all rows are in use.
    """

    pairs: torch.Tensor
    tokens: torch.Tensor
    has_row: torch.Tensor
    splits: DeviceSplits
    unused: torch.Tensor | None

    @classmethod
    def of(
        cls, chosen: torch.Tensor, num_rows: int, *, are_exact: bool, are_reversed: bool = False
    ) -> ChosenRows:
        """Sort the pairs of a map.

        Args:
            chosen: Whether a token chose an expert, shape [tokens, experts], bool.
            num_rows: Rows of the buffer; pairs that exceed it are omitted.
            are_exact: Whether the number of chosen pairs is always ``num_rows``.
            are_reversed: Whether the rows of the last expert come first.
        """
        num_tokens, num_experts = chosen.shape
        by_expert = (chosen.flip(1) if are_reversed else chosen).t().reshape(-1)
        place = by_expert.cumsum(0)
        # The first pair up to which so many are chosen.
        numbers = torch.arange(1, num_rows + 1, device=place.device)
        pairs = torch.searchsorted(place, numbers)
        ends = place.view(num_experts, num_tokens)[:, -1]
        if not are_exact:
            pairs = torch.where(numbers > place[-1], numbers % place.shape[0], pairs)
            ends = ends.clamp(max=num_rows)
            by_expert = by_expert & (place <= num_rows)
        return cls(
            pairs=pairs,
            tokens=pairs % num_tokens,
            has_row=by_expert,
            splits=DeviceSplits(ends.int(), are_reversed),
            unused=None if are_exact else numbers > ends[-1],
        )

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of each row's pair, from ``values`` [tokens, experts]."""
        by_expert = (values.flip(1) if self.splits.are_reversed else values).t().contiguous()
        return self.clear(take_once(by_expert.view(-1), self.pairs, self.has_row))

    def take_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of each row's token, from ``values`` [tokens, ...]."""
        are_reversed = self.splits.are_reversed
        return self.clear(take_rows(values, self.tokens, are_reversed=are_reversed))

    def sum_rows(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the sum of each token's rows, added in the order of the experts."""
        are_reversed = self.splits.are_reversed
        return sum_rows(rows, self.tokens, num_tokens, are_reversed=are_reversed)

    def clear(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` with zeros in unused rows, also for gradients in the backward."""
        if self.unused is None:
            return rows
        unused = self.unused if rows.dim() == 1 else self.unused[:, None]
        return rows.masked_fill(unused, 0)


class Shuffle:
    """Moves groups of rows, which are adjacent in both of two buffers, with gradients.

    Rows of no group are dropped; rows of the other buffer to which none moves are zeros.

    Args:
        sources: First row of each group in the first buffer, ascending from 0, int64 [groups].
        targets: First row of each group in the second buffer, int64 [groups].
        counts: Rows of each group, int64 [groups].
        num_sources: Rows of the first buffer.
        num_targets: Rows of the second buffer.
    """

    def __init__(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        counts: torch.Tensor,
        *,
        num_sources: int,
        num_targets: int,
    ) -> None:
        places = torch.arange(num_sources, device=counts.device)
        group = torch.searchsorted(sources, places, right=True) - 1
        is_used = places < (sources + counts).index_select(0, group)
        target = places + (targets - sources).index_select(0, group)
        # Each row names its own target, unused rows one after the end: torch's deterministic kernel
        # writes the values of a row one after the other.
        own = torch.where(is_used, target, num_targets + places)
        source = places.new_full((num_targets + num_sources,), -1).scatter_(0, own, places)
        # For each row of one buffer its row in the other one, or -1.
        self._sources, self._targets = source[:num_targets], torch.where(is_used, target, -1)

    def move(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the second buffer, from the first one."""
        moved: torch.Tensor = _Moved.apply(rows, self._sources, self._targets)
        return moved

    def move_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the first buffer, from the second one."""
        moved: torch.Tensor = _Moved.apply(rows, self._targets, self._sources)
        return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(targets)
        return _gathered(rows, sources)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (targets,) = ctx.saved_tensors
        return _gathered(grads, targets), None, None


def _gathered(rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    unused = sources < 0
    gathered = rows.index_select(0, sources.clamp(min=0))
    return gathered.masked_fill_(unused.view(-1, *[1] * (rows.dim() - 1)), 0)


def pieces_of(counts: torch.Tensor, num_rows: int, piece: int) -> Shuffle:
    """Cut rows that are sorted by rank into one piece of equal size for each rank.

    Args:
        counts: Rows for each rank, shape [ranks].
        num_rows: Rows of the buffer that is cut.
        piece: Rows of a piece; rows that exceed it are omitted.
    """
    num_ranks = counts.shape[0]
    return Shuffle(
        counts.cumsum(0) - counts,
        torch.arange(num_ranks, device=counts.device) * piece,
        counts.clamp(max=piece),
        num_sources=num_rows,
        num_targets=num_ranks * piece,
    )


def paired_rows(
    counts: torch.Tensor, piece: int, *, are_reversed: bool = False
) -> tuple[Shuffle, DeviceSplits]:
    """Sort pieces of equal size, one from each rank, in which rows are sorted by expert.

    Args:
        counts: Rows of each expert in each piece, shape [ranks, experts].
        piece: Rows of a piece; rows that exceed it are missing from the piece.
        are_reversed: Whether the sorted rows of the last expert come first.

    Returns:
        Shuffle from the pieces to rows sorted by expert, then by rank, and the rows of each expert.
    """
    num_ranks = counts.shape[0]
    ends = counts.cumsum(1).clamp(max=piece)
    begins = torch.nn.functional.pad(ends[:, :-1], (1, 0))
    counts = ends - begins
    sorted_counts = counts.flip(1) if are_reversed else counts
    by_expert = sorted_counts.t().reshape(-1)
    targets = (by_expert.cumsum(0) - by_expert).view(-1, num_ranks).t()
    targets = targets.flip(1) if are_reversed else targets
    pieces = torch.arange(num_ranks, device=counts.device)[:, None] * piece
    shuffle = Shuffle(
        (begins + pieces).view(-1),
        targets.reshape(-1),
        counts.view(-1),
        num_sources=num_ranks * piece,
        num_targets=num_ranks * piece,
    )
    return shuffle, DeviceSplits(sorted_counts.sum(0).cumsum(0).int(), are_reversed)


def padded_rows(splits: DeviceSplits, num_rows: int, multiple: int) -> tuple[Shuffle, DeviceSplits]:
    """Pad the rows of each expert with zeros, like Transformer Engine, without a host read.

    Args:
        splits: Rows of each expert.
        num_rows: Rows of the buffer, in use or not.
        multiple: Divisor of every padded number of rows.

    Returns:
        Shuffle to the padded buffer, and the padded rows of each expert.
    """
    padded = (splits.counts + multiple - 1) // multiple * multiple
    ends = padded.cumsum(0)
    num_padded = num_rows + len(padded) * (multiple - 1)
    shuffle = Shuffle(
        splits.ends - splits.counts,
        ends - padded,
        splits.counts,
        num_sources=num_rows,
        num_targets=num_padded + -num_padded % multiple,
    )
    return shuffle, DeviceSplits(ends.int())
