"""Microbatches of Megatron's packed data sets (``--sft``), on the host before the step.

Each sample says where its documents begin in ``cu_seqlens``, filled up with the sequence length to
one entry more than that. Its documents fill all rows: what is left is in the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chunkgraph.errors import ConfigError
from chunkgraph.packing import check_offsets

__all__ = ["ROWS", "Documents", "cut", "documents_of"]

_OFFSETS = "cu_seqlens"
ROWS = ("tokens", "labels", "loss_mask", "position_ids")
"""What a sample has a value of for each row."""


@dataclass(frozen=True)
class Documents:
    """What a microbatch holds.

    Attributes:
        offsets: where documents begin, as the script will have them, and the end of the last one;
            there may be empty ones.
        num_needed: rows up to the last one that a loss needs; all rows if they are not to be cut.
    """

    offsets: tuple[int, ...]
    num_needed: int

    @property
    def num_rows(self) -> int:
        """All rows."""
        return self.offsets[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each document that has any."""
        steps = np.diff(self.offsets)
        return tuple(steps[steps > 0].tolist())

    def up_to(self, num_rows: int) -> Documents:
        """Those of the first rows; the last one may end early."""
        offsets = np.minimum(self.offsets, num_rows)
        return Documents(tuple(offsets[: _end(offsets, num_rows)].tolist()), self.num_needed)


def documents_of(
    batch: Mapping[str, Any],
    seq_length: int,
    where: str,
    *,
    may_be_cut: bool = False,
    multiple_of: int = 1,
) -> Documents:
    """The documents of a microbatch as its data set gives it, samples end to end.

    Args:
        batch: read from Megatron's data iterator.
        seq_length: rows of a sample.
        where: rank and microbatch, for errors.
        may_be_cut: also look which rows losses need; for microbatches of one sample.
        multiple_of: what context-parallel ranks cut documents in.

    Raises:
        ConfigError: it holds no offsets, or not on the host, or of documents that the ranks cannot
            share.
        PackingError: its offsets are impossible.
    """
    offsets = _on_host(batch, _OFFSETS, where)
    found = [0]
    for row in offsets.reshape(-1, offsets.shape[-1]):
        check_offsets(row, seq_length, where, may_repeat=True)
        if row[-1] != seq_length:
            raise ConfigError(
                f"{where}: the documents of a sample end at {row[-1]}, not at its {seq_length} "
                "rows. The data set has to count what is left of a sample into its last document, "
                "as Megatron's do."
            )
        if multiple_of > 1 and (row % multiple_of).any():
            raise ConfigError(
                f"{where}: documents begin at {row[: _end(row, seq_length)].tolist()}, and the "
                f"context-parallel ranks cut each in {multiple_of} equal pieces. The data set has "
                "to pad them, as Megatron's --sft does where GPTDatasetConfig is given "
                "context_parallel_size."
            )
        found += (row[1 : _end(row, seq_length)] + found[-1]).tolist()
    num_needed = found[-1]
    if may_be_cut:
        counted = np.flatnonzero(_on_host(batch, "loss_mask", where).reshape(-1))
        num_needed = int(counted[-1]) + 1 if len(counted) else 1
    return Documents(tuple(found), num_needed)


def cut(batch: Mapping[str, Any], num_rows: int, where: str) -> dict[str, Any]:
    """A microbatch of one sample without the rows behind ``num_rows``.

    No row sees a later one, and none of those that go is in a loss.
    """
    offsets = np.minimum(_on_host(batch, _OFFSETS, where), num_rows)
    made = dict(batch)
    for name in ROWS:
        if made.get(name) is not None:
            made[name] = made[name][:, :num_rows].contiguous()
    made[_OFFSETS] = torch.from_numpy(offsets)
    longest = batch.get("max_seqlen")
    if isinstance(longest, torch.Tensor):
        made["max_seqlen"] = torch.full_like(longest, int(np.diff(offsets.reshape(-1)).max()))
    return made


def _end(row: NDArray[Any], num_rows: int) -> int:
    """Where the entries end that are not filled up."""
    return int(np.argmax(row == num_rows)) + 1


def _on_host(batch: Mapping[str, Any], name: str, where: str) -> NDArray[Any]:
    value = batch.get(name) if isinstance(batch, Mapping) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        what = "nothing" if value is None else f"a {type(value).__name__} on a device"
        raise ConfigError(
            f"{where}: the data iterator gives {what} as {name!r}. With "
            "--cuda-graph-max-packed-seqs every microbatch says on the host where its documents "
            "begin, as those of Megatron's --sft do, on every pipeline stage."
        )
    return value.numpy()
