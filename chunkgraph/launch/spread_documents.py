"""The documents of a pretrain script that are spread over the data-parallel ranks again.

Every rank reads its own samples, as without chunk graphs; then the ranks tell each other the
documents in them, on the host, and all find the same schedule. What the forward step is handed is
the rank's share of it, one row for each of the schedule's microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from chunkgraph.launch.document_source import DocumentSource, Microbatches, StepData, Turn
from chunkgraph.launch.sft_data import ROWS, Documents
from chunkgraph.megatron.core.gloo_agreement import Gather, Share
from chunkgraph.megatron.features.packing.bank import PackedBank
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.params import ARGUMENT, PADDING_MASK, make_params, sent
from chunkgraph.packing import (
    PackedSequences,
    pack,
    schedule_contexts,
    scheduler_of,
)

__all__ = ["SpreadDocuments"]

_Document = dict[str, NDArray[Any]]
"""Rows of a document by the name that the data set gives them."""


class SpreadDocuments(DocumentSource):
    """Schedules the documents of all ranks; each microbatch names the group that shares it.

    Args:
        banks: of this rank.
        rank: named in errors.
        device: of this rank.
        gather: tells the data-parallel ranks each other's documents.
        share: see `DocumentSource`.
        schedule: which size a microbatch gets.
        seed: of random sizes: a word that differs between steps, the same on all ranks and where a
            step is run again.
        has_experts: whether the model has any, on whatever rank; it is then told which rows are
            padding, which go to none of them.
    """

    def __init__(
        self,
        banks: PackedBanks,
        rank: int,
        *,
        device: torch.device,
        gather: Gather,
        share: Share | None = None,
        schedule: Literal["smallest", "random"] = "smallest",
        seed: Callable[[], str] = str,
        has_experts: bool = False,
    ) -> None:
        super().__init__(rank, share)
        assert banks.limits is not None
        assert banks.groups is not None
        self._banks, self._limits, self._groups = banks, banks.limits, banks.groups
        self._device = device
        self._gather = gather
        self._schedule = schedule
        self._seed = seed
        self._has_experts = has_experts

    def close(self) -> None:
        """Give process groups back."""
        super().close()
        self._gather.close()

    def announce_next(self, num_microbatches: int, iterators: Sequence[Any]) -> None:
        """Say nothing: who works on what needs the other ranks' documents, for which they wait."""

    def begin(self, read: Microbatches, kwargs: dict[str, Any]) -> StepData:
        """Begin a step, and find the schedule that all ranks find."""
        of_ranks = self._documents(read, kwargs["seq_length"])
        own = None if of_ranks is None else [len(d["tokens"]) for d in of_ranks]
        lengths: list[int] = self._shared(own)
        schedule = schedule_contexts(
            lengths, self._limits, scheduler_of(self._schedule, self._limits, self._seed())
        )
        banks = self._banks.of_schedule(schedule, lengths)
        scales = None
        if self._has_experts:
            num_asked = kwargs["num_microbatches"]
            # Fillers add nothing to them.
            num_filled = schedule.mean_filled_microbatches, schedule.num_filled_rounds
            scales = num_asked / num_filled[0], num_asked / num_filled[1]
        handed: list[deque[dict[str, Any]] | None] = [
            None if batches is None else deque() for batches in read
        ]
        turns = []
        for mine, bank in zip(schedule.of_rank(self._groups.rank), banks, strict=True):
            # A filler forwards one token, whose loss does not count.
            packed = pack([lengths[d] for d in mine.documents] or [1], bank.shape)
            rows = packed.rows_of_rank(self._groups.rank % bank.size)
            is_filler = not mine.documents
            padding_mask = (packed.padding_mask | is_filler)[rows][None]
            turns.append(Turn(2, partial(self._inputs, packed, bank, padding_mask)))
            if of_ranks is not None:
                filler = {name: np.zeros_like(values[:1]) for name, values in of_ranks[0].items()}
                documents = [of_ranks[d] for d in mine.documents] or [filler]
                batch = self._batch(documents, packed, rows, kwargs["seq_length"] + 1)
                for batches in handed:
                    if batches is not None:
                        batches.append(dict(batch))
        keywords = {
            "contexts": banks,
            "num_microbatches": schedule.num_microbatches,
            # What stages exchange is as long as the rows of a rank.
            "seq_length": self._limits.max_tokens_per_rank,
        }
        return StepData(handed, turns, keywords, scales)

    def _inputs(
        self, packed: PackedSequences, bank: PackedBank, padding_mask: NDArray[Any], _given: Any
    ) -> dict[str, Any]:
        params = make_params(packed, self._device)
        params.cp_group, params.local_cp_size = bank.group, bank.size
        if not self._has_experts:
            return {ARGUMENT: params}
        return {ARGUMENT: params, PADDING_MASK: sent(padding_mask, self._device)}

    # -- documents -----------------------------------------------------------------------------

    def _documents(self, read: Microbatches, seq_length: int) -> list[_Document] | None:
        """Those of all data-parallel ranks; None where another rank reads them."""
        several = [batches for batches in read if batches is not None]
        own = self._of_chunks(self._documents_of(read, seq_length, may_be_cut=True))
        if own is None:
            return None
        mine = [
            document
            for batch, documents in zip(several[0], own, strict=True)
            for document in _cut_apart(batch, documents)
        ]
        return [document for of_rank in self._gather(mine) for document in of_rank]

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
        """On the host, as a data loader gives it."""
        host = torch.from_numpy(values)
        return host.pin_memory() if self._device.type == "cuda" else host


def _cut_apart(batch: dict[str, Any], documents: Documents) -> list[_Document]:
    """The documents of a sample, but for rows at its end that no loss needs."""
    rows = {name: batch[name][0].numpy() for name in ROWS if batch.get(name) is not None}
    kept = documents.up_to(documents.num_needed)
    ends = np.cumsum(kept.lengths)
    return [
        {name: values[end - length : end] for name, values in rows.items()}
        for length, end in zip(kept.lengths, ends, strict=True)
    ]
