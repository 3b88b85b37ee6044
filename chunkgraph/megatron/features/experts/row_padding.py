"""Pad the rows of each expert to a multiple, as quantized kernels need it, on the device."""

from __future__ import annotations

import torch

from chunkgraph.megatron.features.experts.device_splits import DeviceSplits
from chunkgraph.megatron.features.experts.dropless_rows import Shuffle, inverse_of

__all__ = ["RowPadding"]


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
