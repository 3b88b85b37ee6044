"""Steps of a pretrain script whose documents are spread over the data-parallel ranks anew.

Every rank reads its own samples, as without chunk graphs; then the ranks tell each other the
documents in them, on the host, and all find the same schedule. What the forward step is handed is
the rank's share of it, one row for each of the schedule's microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.launch.script_steps import Microbatches, ScriptSteps
from chunkgraph.launch.sft_data import ROWS, Documents, documents_of
from chunkgraph.megatron.core.gloo_agreement import Gather, Share
from chunkgraph.megatron.features.packing.bank import PackedBank
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.params import PADDING_MASK, make_params, sent
from chunkgraph.packing import (
    ContextLimits,
    ContextMicrobatch,
    ContextScheduler,
    PackedSequences,
    RandomSizes,
    SmallestSizes,
    pack,
    schedule_contexts,
)

__all__ = ["ContextSteps"]

_Document = dict[str, NDArray[Any]]
"""Rows of a document by the name that the data set gives them."""


@dataclass(frozen=True)
class _Turn:
    """A microbatch of this rank.

    Attributes:
        packed: its documents, on all ranks that share it.
        key: of its bank.
        rows: which of those this rank has.
        is_filler: whether it is there for the number alone, and no row of it holds a token.
    """

    packed: PackedSequences
    key: PackedBank
    rows: NDArray[Any]
    is_filler: bool

    @property
    def padding_mask(self) -> NDArray[Any]:
        """Bool [1, rows], True where a row of this rank holds no token."""
        return (self.packed.padding_mask | self.is_filler)[self.rows][None]


class ContextSteps(ScriptSteps):
    """Schedules each step's documents, and gives the model the groups that they are shared in.

    Args:
        banks: of this rank.
        model_chunks: what the schedule is given as ``model``, on this rank's device.
        rank: named in errors.
        gather: tells the data-parallel ranks each other's documents.
        share: see `ScriptSteps`.
        schedule: which size a microbatch gets.
        seed: of random sizes: a word that differs between steps, the same on all ranks and where a
            step is run again.
        has_experts: whether the model has any, on whatever rank; it is then told which rows are
            padding, which go to none of them.
    """

    def __init__(
        self,
        banks: PackedBanks,
        model_chunks: Sequence[nn.Module],
        rank: int,
        *,
        gather: Gather,
        share: Share | None = None,
        schedule: Literal["smallest", "random"] = "smallest",
        seed: Callable[[], str] = str,
        has_experts: bool = False,
    ) -> None:
        super().__init__(model_chunks, rank, share)
        self._banks = banks
        self._gather = gather
        self._schedule = schedule
        self._seed = seed
        self._has_experts = has_experts
        self._device = next(model_chunks[0].parameters()).device
        # Of the step that runs: its microbatches on this rank.
        self._step: list[_Turn] = []

    def close(self) -> None:
        """Leave the model as it was."""
        super().close()
        self._gather.close()

    def announce_next(self, num_microbatches: int) -> None:
        """Say nothing: who works on what needs the other ranks' documents, for which they wait."""

    def _begin(
        self, read: Microbatches, kwargs: dict[str, Any]
    ) -> tuple[Microbatches, dict[str, Any]]:
        limits, groups = self._banks.limits, self._banks.groups
        assert limits is not None
        assert groups is not None
        of_ranks = self._documents(read, kwargs["seq_length"])
        own = None if of_ranks is None else [len(d["tokens"]) for d in of_ranks]
        lengths: list[int] = self._shared(own)
        schedule = schedule_contexts(lengths, limits, self._scheduler(limits))
        keys = self._banks.of_schedule(schedule, lengths)
        if self._has_experts:
            asked = kwargs["num_microbatches"]
            # Fillers add nothing to them.
            ran = schedule.mean_filled_microbatches, schedule.num_filled_rounds
            self.metrics_scales = asked / ran[0], asked / ran[1]
        mine = schedule.of_rank(groups.rank)
        self._step = [
            self._turn([lengths[d] for d in m.documents], key, groups.rank)
            for m, key in zip(mine, keys, strict=True)
        ]
        handed: Microbatches = [None] * len(read)
        if of_ranks is not None:
            width = kwargs["seq_length"] + 1
            batches = [self._batch(i, m, of_ranks, width) for i, m in enumerate(mine)]
            handed = [None if b is None else deque(dict(batch) for batch in batches) for b in read]
        return handed, {
            "contexts": keys,
            "num_microbatches": schedule.num_microbatches,
            # What stages exchange is as long as the rows of a rank.
            "seq_length": limits.max_tokens_per_rank,
        }

    def _params(self, turn: int, given: Any, where: str) -> Any:
        if given.cu_seqlens_q.numel() != 2:
            raise ConfigError(
                f"{where}: the forward step made {given.cu_seqlens_q.numel()} offsets of a "
                "microbatch that was handed to it as one document. It has to read one microbatch "
                "for each call, in their order, and to leave their documents alone."
            )
        own = self._step[turn]
        params = make_params(own.packed, self._device)
        params.cp_group, params.local_cp_size = own.key.group, own.key.size
        return params

    def _besides(self, turn: int) -> dict[str, Any]:
        if not self._has_experts:
            return {}
        return {PADDING_MASK: sent(self._step[turn].padding_mask, self._device)}

    def _turn(self, lengths: Sequence[int], key: PackedBank, rank: int) -> _Turn:
        # A filler forwards one token, whose loss does not count.
        packed = pack(lengths or [1], key.shape)
        rows = packed.rows_of_rank(rank % key.size)
        return _Turn(packed, key, rows, is_filler=not lengths)

    def _scheduler(self, limits: ContextLimits) -> ContextScheduler:
        if self._schedule == "smallest":
            return SmallestSizes()
        most = limits.max_packed_seqs - 1
        return RandomSizes(self._seed(), documents_each=most)

    # -- documents -----------------------------------------------------------------------------

    def _documents(self, read: Microbatches, seq_length: int) -> list[_Document] | None:
        """Those of all data-parallel ranks; None where another rank reads them."""
        several = [batches for batches in read if batches is not None]
        found = [
            [
                documents_of(batch, seq_length, self._where(i), may_be_cut=True)
                for i, batch in enumerate(batches)
            ]
            for batches in several
        ]
        own = self._of_chunks(found)
        if own is None:
            return None
        mine = [
            document
            for batch, documents in zip(several[0], own, strict=True)
            for document in _cut_apart(batch, documents)
        ]
        return [document for of_rank in self._gather(mine) for document in of_rank]

    def _batch(
        self, number: int, m: ContextMicrobatch, documents: Sequence[_Document], width: int
    ) -> dict[str, torch.Tensor]:
        """This rank's rows of a microbatch, as a sample of one document that fills them all."""
        packed, rows = self._step[number].packed, self._step[number].rows
        own = [documents[d] for d in m.documents] or [
            {name: np.zeros_like(values[:1]) for name, values in documents[0].items()}
        ]
        batch = {
            name: self._ready(packed.place(np.concatenate([d[name] for d in own]))[rows][None])
            for name in own[0]
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
