"""The documents of microbatches, as Megatron's data sets give them to a pretrain script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chunkgraph.errors import ConfigError
from chunkgraph.packing import check_offsets

_OFFSETS = "cu_seqlens"
ROWS = ("tokens", "labels", "loss_mask", "position_ids")
"""Fields of a sample with one value for each row."""


@dataclass(frozen=True)
class Documents:
    """The documents of a microbatch.

    Attributes:
        offsets: Beginnings of the documents, as the script computes them, and the end of the last
            one; documents may be empty.
        num_needed: Number of rows up to the last one that a loss needs.
    """

    offsets: tuple[int, ...]
    num_needed: int

    @property
    def num_rows(self) -> int:
        """Return the number of all rows."""
        return self.offsets[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the rows of each nonempty document."""
        steps = np.diff(self.offsets)
        return tuple(steps[steps > 0].tolist())

    def up_to(self, num_rows: int) -> Documents:
        """Return the documents of the first ``num_rows`` rows; the last one may be cut."""
        offsets = np.minimum(self.offsets, num_rows)
        return Documents(tuple(offsets[: _end(offsets, num_rows)].tolist()), self.num_needed)


def documents_of(
    batch: Mapping[str, Any], seq_length: int, where: str, multiple_of: int = 1
) -> Documents:
    """Return the documents of a microbatch from the data set, samples end to end.

    Args:
        batch: Batch from Megatron's data iterator.
        seq_length: Rows of a sample.
        where: Rank and microbatch, for errors.
        multiple_of: Number of pieces into which context-parallel ranks cut each document.

    Raises:
        ConfigError: The batch has no offsets on the host, or documents that the ranks cannot
            share.
        PackingError: The offsets are invalid.
    """
    offsets = _on_host(batch, _OFFSETS, where)
    starts = [0]
    for row in offsets.reshape(-1, offsets.shape[-1]):
        check_offsets(row, seq_length, where)
        if row[-1] != seq_length:
            raise ConfigError(
                f"{where}: the documents of a sample end at {row[-1]}, not at its {seq_length} "
                "rows. The data set must count the padding of a sample in its last document, as "
                "Megatron's data sets do."
            )
        if multiple_of > 1 and (row % multiple_of).any():
            raise ConfigError(
                f"{where}: documents begin at {row[: _end(row, seq_length)].tolist()}, and the "
                f"context-parallel ranks cut each in {multiple_of} equal pieces. The data set must "
                "pad them, as Megatron's --sft does if GPTDatasetConfig has "
                "context_parallel_size."
            )
        starts += (row[1 : _end(row, seq_length)] + starts[-1]).tolist()
    counted = np.flatnonzero(_on_host(batch, "loss_mask", where).reshape(-1))
    return Documents(tuple(starts), int(counted[-1]) + 1 if len(counted) else 1)


def cut(batch: Mapping[str, Any], num_rows: int, where: str) -> dict[str, Any]:
    """Return a copy of a one-sample microbatch with only its first ``num_rows`` rows.

    Attention is causal, and no loss needs the removed rows.
    """
    offsets = np.minimum(_on_host(batch, _OFFSETS, where), num_rows)
    short = dict(batch)
    for name in ROWS:
        if short.get(name) is not None:
            short[name] = short[name][:, :num_rows].contiguous()
    short[_OFFSETS] = torch.from_numpy(offsets)
    longest = batch.get("max_seqlen")
    if isinstance(longest, torch.Tensor):
        short["max_seqlen"] = torch.full_like(longest, int(np.diff(offsets.reshape(-1)).max()))
    return short


def _end(row: NDArray[Any], num_rows: int) -> int:
    """Return the number of entries before the padding."""
    return int(np.argmax(row == num_rows)) + 1


def _on_host(batch: Mapping[str, Any], name: str, where: str) -> NDArray[Any]:
    value = batch.get(name) if isinstance(batch, Mapping) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        what = "nothing" if value is None else f"a {type(value).__name__} on a device"
        raise ConfigError(
            f"{where}: the data iterator gives {what} as {name!r}. With "
            "--cuda-graph-max-packed-seqs every microbatch must contain its documents' offsets "
            "and loss mask on the host, as with Megatron's --sft, on every pipeline stage."
        )
    return value.numpy()
