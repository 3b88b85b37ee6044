"""Redistribute the documents of a pretrain script over the data-parallel ranks.

Every rank reads its own samples, as without chunk graphs. Then the ranks exchange the documents on
the host, and all compute the same schedule. The forward step receives the rank's share, one row for
each microbatch of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chunkgraph.launch.document_source import DocumentSource, Microbatches, StepData, Turn
from chunkgraph.launch.sft_data import ROWS, Documents
from chunkgraph.megatron.core.gloo_agreement import Gather, Share
from chunkgraph.megatron.features.packing.bank import PackedBank
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.params import (
    ARGUMENT,
    PADDING_MASK,
    make_params,
    to_device,
)
from chunkgraph.packing import (
    PackedSequences,
    SmallestSizes,
    pack,
    schedule_contexts,
)

__all__ = ["SpreadDocuments"]

_Document = dict[str, NDArray[Any]]
"""Rows of a document by the data set's name of the field."""


class SpreadDocuments(DocumentSource):
    """Schedules the documents of all ranks; a group of ranks shares each microbatch.

    Args:
        banks: Banks of this rank.
        rank: The rank, for errors.
        device: Device of this rank.
        gather: Function that exchanges documents between the data-parallel ranks.
        share: See `DocumentSource`.
        has_experts: Whether the model has experts, on any rank; the model then receives a mask of
            the padding rows, which are not routed to experts.
    """

    def __init__(
        self,
        banks: PackedBanks,
        rank: int,
        *,
        device: torch.device,
        gather: Gather,
        share: Share | None = None,
        has_experts: bool = False,
    ) -> None:
        super().__init__(rank, share)
        assert banks.limits is not None
        assert banks.groups is not None
        self._banks, self._limits, self._groups = banks, banks.limits, banks.groups
        self._device = device
        self._gather = gather
        self._has_experts = has_experts

    def close(self) -> None:
        """Release process groups."""
        super().close()
        self._gather.close()

    def announce_next(self, num_microbatches: int, iterators: Sequence[Any]) -> None:
        """Announce nothing: the schedule needs the documents of the other ranks."""

    def begin(self, read: Microbatches, kwargs: dict[str, Any]) -> StepData:
        """Begin a step with the schedule that all ranks compute."""
        of_ranks = self._documents(read, kwargs["seq_length"])
        local_lengths = None if of_ranks is None else [len(d["tokens"]) for d in of_ranks]
        lengths: list[int] = self._shared(local_lengths)
        schedule = schedule_contexts(lengths, self._limits, SmallestSizes())
        banks = self._banks.of_schedule(schedule, lengths)
        scales = None
        if self._has_experts:
            num_requested = kwargs["num_microbatches"]
            # Fillers add nothing to the metrics.
            num_filled = schedule.mean_filled_microbatches, schedule.num_filled_rounds
            scales = num_requested / num_filled[0], num_requested / num_filled[1]
        share: list[deque[dict[str, Any]] | None] = [
            None if batches is None else deque() for batches in read
        ]
        turns = []
        for microbatch, bank in zip(schedule.of_rank(self._groups.rank), banks, strict=True):
            # A filler forwards one token, whose loss does not count.
            packed = pack([lengths[d] for d in microbatch.documents] or [1], bank.shape)
            rows = packed.rows_of_rank(self._groups.rank % bank.size)
            is_filler = not microbatch.documents
            padding_mask = (packed.padding_mask | is_filler)[rows][None]
            turns.append(Turn(2, partial(self._inputs, packed, bank, padding_mask)))
            if of_ranks is not None:
                filler = {name: np.zeros_like(values[:1]) for name, values in of_ranks[0].items()}
                documents = [of_ranks[d] for d in microbatch.documents] or [filler]
                batch = self._batch(documents, packed, rows, kwargs["seq_length"] + 1)
                for batches in share:
                    if batches is not None:
                        batches.append(dict(batch))
        keywords = {
            "contexts": banks,
            "num_microbatches": schedule.num_microbatches,
            # Activations between stages have as many rows as a rank.
            "seq_length": self._limits.max_tokens_per_rank,
        }
        return StepData(share, turns, keywords, scales)

    def _inputs(
        self, packed: PackedSequences, bank: PackedBank, padding_mask: NDArray[Any], _params: Any
    ) -> dict[str, Any]:
        params = make_params(packed, self._device)
        params.cp_group, params.local_cp_size = bank.group, bank.size
        if not self._has_experts:
            return {ARGUMENT: params}
        return {ARGUMENT: params, PADDING_MASK: to_device(padding_mask, self._device)}

    # -- documents -----------------------------------------------------------------------------

    def _documents(self, read: Microbatches, seq_length: int) -> list[_Document] | None:
        """Return the documents of all data-parallel ranks; None if another rank reads them."""
        by_chunk = [batches for batches in read if batches is not None]
        by_batch = self._of_chunks(self._documents_of(read, seq_length, may_be_cut=True))
        if by_batch is None:
            return None
        local = [
            document
            for batch, documents in zip(by_chunk[0], by_batch, strict=True)
            for document in _split(batch, documents)
        ]
        return [document for of_rank in self._gather(local) for document in of_rank]

    def _batch(
        self,
        documents: Sequence[_Document],
        packed: PackedSequences,
        rows: NDArray[Any],
        width: int,
    ) -> dict[str, torch.Tensor]:
        """Return this rank's rows, as a sample of one document that fills them all."""
        batch = {
            name: self._ready(
                packed.place(np.concatenate([d[name] for d in documents]))[rows][None]
            )
            for name in documents[0]
        }
        offsets = np.full((1, width), len(rows), dtype=np.int32)
        offsets[0, 0] = 0
        batch["cu_seqlens"] = self._ready(offsets)
        batch["max_seqlen"] = self._ready(np.array([len(rows)], dtype=np.int32))
        return batch

    def _ready(self, values: NDArray[Any]) -> torch.Tensor:
        """Return a host tensor as from a data loader: pinned if the device is a GPU."""
        host = torch.from_numpy(values)
        return host.pin_memory() if self._device.type == "cuda" else host


def _split(batch: dict[str, Any], documents: Documents) -> list[_Document]:
    """Return the documents of a sample, without rows at its end that no loss needs."""
    rows = {name: batch[name][0].numpy() for name in ROWS if batch.get(name) is not None}
    needed = documents.up_to(documents.num_needed)
    ends = np.cumsum(needed.lengths)
    return [
        {name: values[end - length : end] for name, values in rows.items()}
        for length, end in zip(needed.lengths, ends, strict=True)
    ]
