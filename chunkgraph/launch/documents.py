"""Find the documents of a step's microbatches: a rank's own, or spread over data-parallel ranks."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chunkgraph.errors import ConfigError, PackingError
from chunkgraph.launch.packed_steps import (
    ROWS,
    Documents,
    DocumentSource,
    Microbatches,
    StepData,
    Turn,
    cut,
    look_ahead,
)
from chunkgraph.megatron.attached import MegatronChunkGraphs
from chunkgraph.megatron.core.gloo_agreement import Gather, Share
from chunkgraph.megatron.features.packing.bank import PackedBank
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.params import (
    ARGUMENT,
    PADDING_MASK,
    fixed_params,
    make_params,
    to_device,
)
from chunkgraph.packing import (
    PackedSequences,
    PackedShape,
    SmallestSizes,
    pack,
    schedule_contexts,
    smallest_that_fits,
)

__all__ = ["OwnDocuments", "SpreadDocuments"]


@dataclass(frozen=True)
class _StepShape:
    """The amount of data that a step reads, from the schedule's keywords; equal on all ranks."""

    num_microbatches: int
    seq_length: int
    micro_batch_size: int


@dataclass(frozen=True)
class _Ahead:
    """The expected next step.

    Attributes:
        shape: The amount of data that the step is expected to read.
        documents: The announced documents of each microbatch, uncut; None without announcement.
    """

    shape: _StepShape
    documents: list[Documents] | None


class OwnDocuments(DocumentSource):
    """Supplies the documents of a rank's own samples, with a fixed context-parallel size.

    Args:
        graphs: Graphs attached with ``packing``, which receive the documents of each step.
        rank: The rank, for errors.
        share: See `DocumentSource`.
    """

    def __init__(self, graphs: MegatronChunkGraphs, rank: int, share: Share | None = None) -> None:
        super().__init__(rank, share)
        self._graphs = graphs
        self._last_shape: _StepShape | None = None
        self._ahead: _Ahead | None = None

    def announce_next(self, num_microbatches: int, iterators: Sequence[Any]) -> None:
        """Announce the documents of the next training step; see `DocumentSource`.

        Announce nothing if the step's data cannot be inspected, end early, or are wrong; the step
        reports wrong data when it begins.
        """
        if self._last_shape is None:
            return
        shape = replace(self._last_shape, num_microbatches=num_microbatches)
        read = _look(num_microbatches, iterators)
        local: list[Documents] | None = None
        if read is not None:
            with contextlib.suppress(ConfigError, PackingError):
                local = self._documents(read, shape)
        documents: list[Documents] | None = local if self._share is None else self._share(local)
        if documents is not None:
            try:
                self._graphs.announce([d.lengths for d in self._fit(documents, shape)])
            except (ConfigError, PackingError):
                documents = None
        self._ahead = _Ahead(shape, documents)

    def begin(self, read: Microbatches, kwargs: dict[str, Any]) -> StepData:
        """Begin a step; check its documents against the announced ones."""
        self._last_shape = shape = _StepShape(
            kwargs["num_microbatches"], kwargs["seq_length"], kwargs["micro_batch_size"]
        )
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.shape != shape:
            # The loop runs a different step than expected; all ranks run the same loop.
            self._graphs.withdraw()
            ahead = None
        local = self._documents(read, shape)
        announced = None if ahead is None else ahead.documents
        if announced is None:
            documents = self._shared(local)
        elif local is None or local == announced:
            documents = announced
        else:
            raise ConfigError(
                f"rank {self._rank}: the documents of the step differ from those that were "
                "announced to the other ranks. Between two steps, do not read from the data "
                "iterators and do not replace them."
            )
        changes: dict[str, Any] = {}
        fitted = self._fit(documents, shape)
        if self._is_cut(documents, shape):
            self._cut(read, documents, fitted)
            # Activations between stages have the length of the longest shape.
            changes["seq_length"] = next(iter(self._graphs.buckets))
        shapes = self._graphs.packed_shapes
        turns = [Turn(len(d.offsets), partial(_inputs, _packed(d.lengths, shapes))) for d in fitted]
        return StepData(read, turns, {**changes, "packings": [d.lengths for d in fitted]})

    def _documents(self, read: Microbatches, shape: _StepShape) -> list[Documents] | None:
        """Return the documents of each microbatch, equal for all chunks; None if not read here."""
        multiple = next(iter(self._graphs.buckets.values())).document_multiple
        may_be_cut = self._may_be_cut(shape)
        return self._of_chunks(
            self._documents_of(read, shape.seq_length, may_be_cut=may_be_cut, multiple_of=multiple)
        )

    def _may_be_cut(self, shape: _StepShape) -> bool:
        """Return whether any captured shape has fewer rows than a microbatch."""
        shapes = self._graphs.buckets
        return len(shapes) > 1 or next(iter(shapes)) < shape.seq_length * shape.micro_batch_size

    def _is_cut(self, documents: Sequence[Documents], shape: _StepShape) -> bool:
        """Return whether to cut: the needed rows of every microbatch fit the longest shape."""
        most = next(iter(self._graphs.buckets))
        return self._may_be_cut(shape) and all(d.num_needed <= most for d in documents)

    def _fit(self, documents: Sequence[Documents], shape: _StepShape) -> list[Documents]:
        """Cut each microbatch to the rows of the smallest shape that holds its needed rows."""
        if not self._is_cut(documents, shape):
            return list(documents)
        fitted = list(documents)
        shapes = self._graphs.buckets
        most = max(shapes)
        for i, uncut in enumerate(documents):
            rows = min(length for length in shapes if length >= uncut.num_needed)
            if smallest_that_fits(uncut.up_to(rows).lengths, shapes.values()) is None:
                rows = most  # too many documents: stages expect the longest shape if none fits
            if rows != uncut.num_rows:
                fitted[i] = uncut.up_to(rows)
        return fitted

    def _cut(
        self, read: Microbatches, documents: Sequence[Documents], fitted: Sequence[Documents]
    ) -> None:
        """Remove the rows from each microbatch that `_fit` removed from its documents."""
        for i, (uncut, short) in enumerate(zip(documents, fitted, strict=True)):
            if short.num_rows == uncut.num_rows:
                continue
            for batches in read:
                if batches is not None:
                    batches[i] = cut(
                        batches[i], short.num_rows, f"rank {self._rank}, microbatch {i}"
                    )


def _look(num_microbatches: int, iterators: Sequence[Any]) -> Microbatches | None:
    """Return the next microbatches of each chunk; None if they cannot be inspected."""
    read: list[deque[dict[str, Any]] | None] = []
    for iterator in iterators:
        if iterator is None:
            read.append(None)
            continue
        ahead = look_ahead(iterator)
        batches = None if ahead is None else ahead.first(num_microbatches)
        if batches is None:
            return None
        read.append(deque(batches))
    return read


def _packed(lengths: Sequence[int], shapes: Collection[PackedShape]) -> PackedSequences | None:
    """Pack documents into the smallest shape that holds them; None if the step is eager."""
    shape = smallest_that_fits(lengths, shapes)
    return None if shape is None else pack(lengths, shape)


def _inputs(packed: PackedSequences | None, params: Any) -> dict[str, Any]:
    return {ARGUMENT: params if packed is None else fixed_params(params, packed)}


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
