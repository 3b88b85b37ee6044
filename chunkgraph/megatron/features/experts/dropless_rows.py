"""Place rows in buffers of fixed size; all positions are computed on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

__all__ = [
    "ChosenRows",
    "DeviceSplits",
    "PairedRows",
    "RowPadding",
    "Shuffle",
    "inverse_of",
    "pieces_of",
    "sum_rows",
    "take_rows",
]


@dataclass(frozen=True)
class DeviceSplits:
    """Replacement for Megatron's ``tokens_per_expert`` on the device.

    Attributes:
        ends: End of each local expert's rows, shape [experts], int32, on the device.
    """

    ends: torch.Tensor
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
        ends: End of each expert's rows, shape [experts], int32.
        num_chosen: Number of chosen pairs, a scalar tensor.
        unused: True for rows without a pair, shape [num_rows]; None if all rows are in use.
    """

    pairs: torch.Tensor
    tokens: torch.Tensor
    has_row: torch.Tensor
    ends: torch.Tensor
    num_chosen: torch.Tensor
    unused: torch.Tensor | None

    @classmethod
    def of(cls, chosen: torch.Tensor, num_rows: int, *, are_exact: bool) -> ChosenRows:
        """Sort the pairs of a map.

        Args:
            chosen: Whether a token chose an expert, shape [tokens, experts], bool.
            num_rows: Rows of the buffer; pairs that exceed it are omitted.
            are_exact: Whether the number of chosen pairs is always ``num_rows``.
        """
        num_tokens, num_experts = chosen.shape
        by_expert = chosen.t().reshape(-1)
        place = by_expert.cumsum(0)
        # The first pair up to which so many are chosen.
        numbers = torch.arange(1, num_rows + 1, device=place.device)
        pairs = torch.searchsorted(place, numbers)
        ends = all_ends = place.view(num_experts, num_tokens)[:, -1]
        if not are_exact:
            pairs = torch.where(numbers > place[-1], numbers % place.shape[0], pairs)
            ends = all_ends.clamp(max=num_rows)
            by_expert = by_expert & (place <= num_rows)
        return cls(
            pairs=pairs,
            tokens=pairs % num_tokens,
            has_row=by_expert,
            ends=ends.int(),
            num_chosen=all_ends[-1],
            unused=None if are_exact else _after(ends, num_rows),
        )

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of each row's pair, from ``values`` [tokens, experts]."""
        by_expert = values.t().contiguous().view(-1)
        taken: torch.Tensor = _TakenOnce.apply(by_expert, self.pairs, self.has_row)
        return self.clear(taken)

    def clear(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` with zeros in unused rows, also for gradients in the backward."""
        if self.unused is None:
            return rows
        unused = self.unused if rows.dim() == 1 else self.unused[:, None]
        return rows.masked_fill(unused, 0)


def take_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` at ``places``, which are all inside, with gradients."""
    taken: torch.Tensor = _Taken.apply(rows, places)
    return taken


def sum_rows(rows: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return ``num_rows`` rows, each the sum of those that name it, with gradients.

    Args:
        rows: Rows, shape [n, ...].
        places: Index of the sum to which a row is added, shape [n], all inside.
        num_rows: Number of sums.
    """
    summed: torch.Tensor = _Summed.apply(rows, places, num_rows)
    return summed


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        return _sums(grads, places, ctx.num_rows), None


class _TakenOnce(torch.autograd.Function):
    """Take each value for one row at most; unused rows, after the others, give no gradient.

    So no gradients are summed, which takes ten kernels more if kernels are deterministic.
    """

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


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        return _sums(rows, places, num_rows)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads.index_select(0, places), None, None


def _sums(rows: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
    sums = rows.new_zeros(num_rows, *rows.shape[1:])
    if rows.is_cuda and torch.are_deterministic_algorithms_enabled():
        # The kernel of a deterministic index_add_, without its copy of the rows and its checks of
        # the indices, which are seven kernels.
        unsafe: Any = torch.ops.aten._index_put_impl_
        unsafe(sums, [places], rows, accumulate=True, unsafe=True)
        return sums
    return sums.index_add_(0, places, rows)


class Shuffle:
    """Moves rows between two buffers, each row at most once, with gradients.

    Args:
        sources: Row of the first buffer for each row of the second one; -1 for zeros.
        targets: Row of the second buffer for each row of the first one; -1 to drop the row.
    """

    def __init__(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._sources = sources
        self._targets = targets

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


@dataclass(frozen=True)
class PairedRows:
    """Equal pieces of a buffer, one from each of several ranks, and their rows by expert.

    Attributes:
        by_expert: Moves rows from the pieces to rows sorted by expert, then by rank.
        ends: End of each expert's rows, shape [experts], int32.
    """

    by_expert: Shuffle
    ends: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor, piece: int) -> PairedRows:
        """Sort pieces in which rows are sorted by expert.

        Args:
            counts: Rows of each expert in each piece, shape [ranks, experts].
            piece: Rows of a piece; rows that exceed it are missing from the piece.
        """
        num_ranks, num_experts = counts.shape
        piece_ends = counts.cumsum(1).clamp(max=piece)
        begins = torch.nn.functional.pad(piece_ends[:, :-1], (1, 0))
        counts = piece_ends - begins
        # Begin of each rank's rows among all rows; the rows of an expert are adjacent.
        by_expert = counts.t().reshape(-1)
        starts = (by_expert.cumsum(0) - by_expert).view(num_experts, num_ranks).t()
        places = torch.arange(piece, device=counts.device).expand(num_ranks, piece).contiguous()
        expert = torch.searchsorted(piece_ends, places, right=True)
        is_used = expert < num_experts
        expert = expert.clamp(max=num_experts - 1)
        target = starts.gather(1, expert) + places - begins.gather(1, expert)
        target = torch.where(is_used, target, -1).view(-1)
        source = inverse_of(target, num_ranks * piece)
        return cls(Shuffle(source, target), counts.sum(0).cumsum(0).int())


def pieces_of(counts: torch.Tensor, num_rows: int, piece: int) -> Shuffle:
    """Cut rows that are sorted by rank into one piece of equal size for each rank.

    Args:
        counts: Rows for each rank, shape [ranks].
        num_rows: Rows of the buffer that is cut.
        piece: Rows of a piece; rows that exceed it are omitted.
    """
    ends = counts.cumsum(0)
    places = torch.arange(num_rows, device=counts.device)
    rank = torch.searchsorted(ends, places, right=True)
    is_used = rank < counts.shape[0]
    rank = rank.clamp(max=counts.shape[0] - 1)
    within = places - (ends - counts).index_select(0, rank)
    target = torch.where(is_used & (within < piece), rank * piece + within, -1)
    return Shuffle(inverse_of(target, counts.shape[0] * piece), target)


def inverse_of(targets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return for each of ``num_rows`` rows which target names it, or -1; targets of -1 name none.

    Each target writes to its own row: torch's deterministic kernel writes the values of a row
    one after the other.
    """
    numbers = torch.arange(targets.shape[0], device=targets.device)
    row = torch.where(targets >= 0, targets, num_rows + numbers)
    by_row = numbers.new_full((num_rows + targets.shape[0],), -1)
    return by_row.scatter_(0, row, numbers)[:num_rows]


def _after(ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    return torch.arange(num_rows, device=ends.device) >= ends[-1]


def _gathered(rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    unused = sources < 0
    gathered = rows.index_select(0, sources.clamp(min=0))
    return gathered.masked_fill_(unused.view(-1, *[1] * (rows.dim() - 1)), 0)


class RowPadding:
    """Transformer Engine's padding of experts' rows, without a read on the host.

    Padding rows are zeros, after the rows of their expert.

    Args:
        splits: Rows of each expert.
        num_rows: Rows of the buffer, in use or not.
        multiple: Divisor of every padded number of rows.

    Attributes:
        splits: Padded rows of each expert.
    """

    def __init__(self, splits: DeviceSplits, num_rows: int, multiple: int) -> None:
        num_experts = len(splits.ends)
        padded = (splits.counts + multiple - 1) // multiple * multiple
        ends = padded.cumsum(0)
        self.splits = DeviceSplits(ends.int())
        places = torch.arange(num_rows, device=ends.device)
        expert = torch.searchsorted(splits.ends, places.int(), right=True)
        # Padding rows in front of an expert's rows.
        moved = (ends - padded) - (splits.ends - splits.counts)
        target = places + moved.index_select(0, expert.clamp(max=num_experts - 1))
        target = torch.where(expert < num_experts, target, -1)
        num_padded = num_rows + num_experts * (multiple - 1)
        num_padded += -num_padded % multiple
        self._shuffle = Shuffle(inverse_of(target, num_padded), target)

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the padded buffer, with gradients."""
        return self._shuffle.move(rows)

    def unpad(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the buffer without the padding rows, with gradients."""
        return self._shuffle.move_back(rows)
