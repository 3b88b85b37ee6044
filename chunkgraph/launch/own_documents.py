"""Documents of a pretrain script whose ranks keep the samples that they read."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from chunkgraph.errors import ConfigError, PackingError
from chunkgraph.launch.document_source import DocumentSource, Microbatches, StepData, Turn
from chunkgraph.launch.look_ahead import look_ahead
from chunkgraph.launch.sft_data import Documents, cut
from chunkgraph.megatron.attached import MegatronChunkGraphs
from chunkgraph.megatron.core.gloo_agreement import Share
from chunkgraph.megatron.features.packing.params import ARGUMENT, fixed_params
from chunkgraph.packing import PackedSequences, PackedShape, pack, smallest_that_fits

__all__ = ["OwnDocuments"]


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
