"""Steps of a pretrain script on packed sequences of one context-parallel size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.packed import fixed_params
from chunkgraph.megatron.rank_graphs import MegatronChunkGraphs
from chunkgraph.megatron.script_steps import Microbatches, ScriptSteps
from chunkgraph.megatron.sft_data import Documents, cut, documents_of
from chunkgraph.megatron.topology import Share
from chunkgraph.packing import PackedSequences, PackedShape, pack, smallest_that_fits

__all__ = ["PackedSteps"]


class PackedSteps(ScriptSteps):
    """Tells chunk graphs the documents of each step, and gives the model offsets of fixed shape.

    Args:
        graphs: attached with ``packing``.
        model_chunks: what the schedule is given as ``model``.
        rank: named in errors.
        share: see `ScriptSteps`.
    """

    def __init__(
        self,
        graphs: MegatronChunkGraphs,
        model_chunks: Sequence[nn.Module],
        rank: int,
        share: Share | None = None,
    ) -> None:
        super().__init__(model_chunks, rank, share)
        self._graphs = graphs
        # Of the step that runs: its documents, packed where a shape holds them.
        self._step: list[tuple[Documents, PackedSequences | None]] = []

    def _begin(
        self, read: Microbatches, kwargs: dict[str, Any]
    ) -> tuple[Microbatches, dict[str, Any]]:
        shapes = self._graphs.buckets
        rows = kwargs["seq_length"] * kwargs["micro_batch_size"]
        most = next(iter(shapes))
        may_be_cut = len(shapes) > 1 or most < rows
        documents = self._documents(read, kwargs["seq_length"], may_be_cut=may_be_cut)
        changes: dict[str, Any] = {}
        if may_be_cut and all(d.num_needed <= most for d in documents):
            documents = self._cut(read, documents)
            # What stages exchange is as long as the longest of the shapes.
            changes["seq_length"] = most
        every = self._graphs.packed_shapes
        self._step = [(d, _packed(d, every)) for d in documents]
        return read, {**changes, "packings": [d.lengths for d in documents]}

    def _params(self, turn: int, given: Any, where: str) -> Any:
        documents, packed = self._step[turn]
        if given.cu_seqlens_q.numel() != len(documents.offsets):
            raise ConfigError(
                f"{where}: the forward step made {given.cu_seqlens_q.numel()} offsets of a "
                f"microbatch whose data have {len(documents.offsets)}. It has to read one "
                "microbatch for each call, in their order, and to leave their documents alone."
            )
        return given if packed is None else fixed_params(given, packed)

    def _documents(
        self, read: Microbatches, seq_length: int, *, may_be_cut: bool
    ) -> list[Documents]:
        """The documents of each microbatch, the same for all chunks."""
        multiple = next(iter(self._graphs.buckets.values())).document_multiple
        found = [
            [
                documents_of(
                    batch,
                    seq_length,
                    self._where(i),
                    may_be_cut=may_be_cut,
                    multiple_of=multiple,
                )
                for i, batch in enumerate(batches)
            ]
            for batches in read
            if batches is not None
        ]
        return self._shared(self._of_chunks(found))

    def _cut(self, read: Microbatches, documents: Sequence[Documents]) -> list[Documents]:
        """Give each microbatch the rows of the smallest shape that holds those it needs."""
        made = list(documents)
        shapes = self._graphs.buckets
        most = max(shapes)
        for i, own in enumerate(documents):
            rows = min(length for length in shapes if length >= own.num_needed)
            if smallest_that_fits(own.up_to(rows).lengths, shapes.values()) is None:
                rows = most  # too many documents: as the stages expect of what does not fit
            if rows == own.num_rows:
                continue
            made[i] = own.up_to(rows)
            for batches in read:
                if batches is not None:
                    batches[i] = cut(batches[i], rows, self._where(i))
        return made


def _packed(documents: Documents, shapes: Collection[PackedShape]) -> PackedSequences | None:
    """The documents in the smallest shape that holds them; None: the step is eager."""
    shape = smallest_that_fits(documents.lengths, shapes)
    return None if shape is None else pack(documents.lengths, shape)
