"""The documents of a pretrain script whose ranks keep the samples that they read."""

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
class _Asked:
    """What a step reads, by what a schedule is called with; the same on all ranks."""

    num_microbatches: int
    seq_length: int
    micro_batch_size: int


@dataclass(frozen=True)
class _Ahead:
    """What the next step was taken for, when it was looked at.

    Attributes:
        asked: what it reads.
        documents: of each microbatch, uncut, which were announced; None: nothing was.
    """

    asked: _Asked
    documents: list[Documents] | None


class OwnDocuments(DocumentSource):
    """The documents of a rank's own samples, whose context-parallel size is fixed.

    Args:
        graphs: attached with ``packing``; they are told the documents of each step.
        rank: named in errors.
        share: see `DocumentSource`.
    """

    def __init__(self, graphs: MegatronChunkGraphs, rank: int, share: Share | None = None) -> None:
        super().__init__(rank, share)
        self._graphs = graphs
        self._asked: _Asked | None = None  # of the step that was begun last
        self._ahead: _Ahead | None = None

    def announce_next(self, num_microbatches: int, iterators: Sequence[Any]) -> None:
        """Say what the training step that comes next holds; see `DocumentSource`.

        Nothing is said where its data cannot be looked at, end before it, or are wrong, of which
        the step complains when it begins.
        """
        if self._asked is None:
            return
        asked = replace(self._asked, num_microbatches=num_microbatches)
        read = _look(num_microbatches, iterators)
        own: list[Documents] | None = None
        if read is not None:
            with contextlib.suppress(ConfigError, PackingError):
                own = self._documents(read, asked)
        documents: list[Documents] | None = own if self._share is None else self._share(own)
        if documents is not None:
            try:
                self._graphs.announce([d.lengths for d in self._fitted(documents, asked)])
            except (ConfigError, PackingError):
                documents = None
        self._ahead = _Ahead(asked, documents)

    def begin(self, read: Microbatches, kwargs: dict[str, Any]) -> StepData:
        """Begin a step, which holds what was looked at ahead of it."""
        self._asked = asked = _Asked(
            kwargs["num_microbatches"], kwargs["seq_length"], kwargs["micro_batch_size"]
        )
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.asked != asked:
            # Another step than the loop's settings said: so on all ranks, which run one loop.
            self._graphs.withdraw()
            ahead = None
        own = self._documents(read, asked)
        announced = None if ahead is None else ahead.documents
        if announced is None:
            documents = self._shared(own)
        elif own is None or own == announced:
            documents = announced
        else:
            raise ConfigError(
                f"rank {self._rank}: the step has other documents than were looked at ahead of it "
                "and told to the other ranks. Between two steps nobody but the step may read from "
                "its data iterators, and they stay the same ones."
            )
        changes: dict[str, Any] = {}
        fitted = self._fitted(documents, asked)
        if self._is_cut(documents, asked):
            self._cut(read, documents, fitted)
            # What stages exchange is as long as the longest of the shapes.
            changes["seq_length"] = next(iter(self._graphs.buckets))
        shapes = self._graphs.packed_shapes
        turns = [Turn(len(d.offsets), partial(_inputs, _packed(d.lengths, shapes))) for d in fitted]
        return StepData(read, turns, {**changes, "packings": [d.lengths for d in fitted]})

    def _documents(self, read: Microbatches, asked: _Asked) -> list[Documents] | None:
        """Return the documents of each microbatch, alike for all chunks; None: not read here."""
        multiple = next(iter(self._graphs.buckets.values())).document_multiple
        may_be_cut = self._may_be_cut(asked)
        return self._of_chunks(
            self._documents_of(read, asked.seq_length, may_be_cut=may_be_cut, multiple_of=multiple)
        )

    def _may_be_cut(self, asked: _Asked) -> bool:
        """Whether there is a shape with fewer rows than a microbatch."""
        shapes = self._graphs.buckets
        return len(shapes) > 1 or next(iter(shapes)) < asked.seq_length * asked.micro_batch_size

    def _is_cut(self, documents: Sequence[Documents], asked: _Asked) -> bool:
        """Whether the rows that losses need fit the shapes, in every microbatch."""
        most = next(iter(self._graphs.buckets))
        return self._may_be_cut(asked) and all(d.num_needed <= most for d in documents)

    def _fitted(self, documents: Sequence[Documents], asked: _Asked) -> list[Documents]:
        """With the rows of the smallest shape that holds those that each microbatch needs."""
        if not self._is_cut(documents, asked):
            return list(documents)
        made = list(documents)
        shapes = self._graphs.buckets
        most = max(shapes)
        for i, own in enumerate(documents):
            rows = min(length for length in shapes if length >= own.num_needed)
            if smallest_that_fits(own.up_to(rows).lengths, shapes.values()) is None:
                rows = most  # too many documents: as the stages expect of what does not fit
            if rows != own.num_rows:
                made[i] = own.up_to(rows)
        return made

    def _cut(
        self, read: Microbatches, documents: Sequence[Documents], fitted: Sequence[Documents]
    ) -> None:
        """Take the rows from each microbatch that `_fitted` took from its documents."""
        for i, (own, made) in enumerate(zip(documents, fitted, strict=True)):
            if made.num_rows == own.num_rows:
                continue
            for batches in read:
                if batches is not None:
                    batches[i] = cut(
                        batches[i], made.num_rows, f"rank {self._rank}, microbatch {i}"
                    )


def _look(num_microbatches: int, iterators: Sequence[Any]) -> Microbatches | None:
    """Return the next microbatches of each chunk; None if they cannot be looked at."""
    read: list[deque[dict[str, Any]] | None] = []
    for iterator in iterators:
        if iterator is None:
            read.append(None)
            continue
        below = look_ahead(iterator)
        batches = None if below is None else below.first(num_microbatches)
        if batches is None:
            return None
        read.append(deque(batches))
    return read


def _packed(lengths: Sequence[int], shapes: Collection[PackedShape]) -> PackedSequences | None:
    """Return documents in the smallest shape that holds them; None: the step is eager."""
    shape = smallest_that_fits(lengths, shapes)
    return None if shape is None else pack(lengths, shape)


def _inputs(packed: PackedSequences | None, params: Any) -> dict[str, Any]:
    return {ARGUMENT: params if packed is None else fixed_params(params, packed)}
