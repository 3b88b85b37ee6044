"""Draw a run's microbatches on this rank: sequences of one text, or packed whole documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chunkgraph.data import DocumentRow, Documents, DrawnDocuments, PackedText
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.collectives import agree_by_maximum
from chunkgraph.megatron.features.packing.attention_limits import shares_keys
from chunkgraph.megatron.features.packing.banks import Buckets
from chunkgraph.megatron.features.packing.options import PackingOptions
from chunkgraph.megatron.features.packing.params import make_params, sent
from chunkgraph.packing import (
    PackedSequences,
    PackedShape,
    pack,
    reason_not_to_fit,
)
from chunkgraph.settings import Config

__all__ = [
    "PackedBatches",
    "SequenceBatches",
    "make_batches",
    "packed_shape",
    "packing_options",
    "sequence_batches",
]

Batch = dict[str, Any]

_NUM_CHOSEN = 4
"""Number of steps whose buckets are cached: the current one and the next, which is announced."""


def packed_shape(config: Config, model_config: Any = None) -> PackedShape | None:
    """Return the fixed shape of the run's packed microbatches.

    Padding counts as tokens if heads share keys (see `needs_tokens_in_pieces`), or if documents
    are padded more than context parallelism requires.

    Args:
        config: the run.
        model_config: Megatron's TransformerConfig, if documents are packed into the shape.

    Returns:
        The shape; None without packing, or if microbatches differ in their context-parallel size.
    """
    if not config.packing.max_packed_seqs or config.packing.context_parallel_sizes:
        return None
    multiple = config.packing.pad_seq_to_mult
    return PackedShape(
        config.packing.max_packed_seqs,
        config.tokens_per_sequence,
        context_parallel_size=config.pipeline.context_parallel_size,
        max_document_tokens=config.packing.max_document_tokens,
        counts_padding=multiple > 1 or (model_config is not None and shares_keys(model_config)),
        pad_seq_to_mult=multiple,
    )


def packing_options(config: Config, model_config: Any) -> PackingOptions | None:
    """Return all shapes that are captured; None without a fixed shape. See `packed_shape`."""
    shape = packed_shape(config, model_config)
    if shape is None:
        return None
    return PackingOptions(shape, config.packing.buckets, config.seq_buckets)


def make_batches(
    config: Config, device: torch.device, model_config: Any
) -> SequenceBatches | PackedBatches:
    """Create the source of the run's microbatches. All ranks call this together.

    Args:
        config: the run.
        device: this rank's device.
        model_config: Megatron's TransformerConfig.
    """
    shape = packed_shape(config, model_config)
    return (
        SequenceBatches(config, device)
        if shape is None
        else PackedBatches(config, shape, device, model_config)
    )


def _documents(config: Config, shape: PackedShape) -> Documents | DrawnDocuments:
    path, counts = config.data.path, config.data.document_counts
    rows = {
        "num_tokens": shape.max_packed_tokens,
        "seed": config.train.seed,
        "multiple": shape.document_multiple,
    }
    if counts:
        return DrawnDocuments.from_file(path, counts, **rows)
    return Documents.from_file(path, **rows)


class SequenceBatches:
    """Sequences of one length, cut from all documents end to end."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._text = PackedText.from_file(
            config.data.path, seq_length=config.model.seq_length, seed=config.train.seed
        )

    def schedule_options(self, _step: int, _count: int, *, has_graphs: bool) -> dict[str, Any]:
        """Return nothing: every microbatch has the same shape."""
        del has_graphs
        return {}

    def packings(self, _step: int, _num_microbatches: int) -> None:
        """Return None: nothing is packed."""

    def buckets(self, _step: int, _num_microbatches: int) -> None:
        """Return None: there is one length."""

    def num_microbatches(self, _step: int, count: int) -> int:
        """Return ``count``."""
        return count

    def close(self) -> None:
        """Do nothing."""

    def step(self, step: int, num_microbatches: int) -> Iterator[Batch]:
        """Draw the step's microbatches, for one chunk."""
        return sequence_batches(self._config, self._text, step, num_microbatches, self._device)


class PackedBatches:
    """Whole documents in one row, with their offsets.

    Everything is computed on the host and copied to the device. A microbatch that does not fit the
    shape gets longer offsets, and its step runs eagerly.

    The rows after the documents hold token 0, whose activations are finite. A weight's gradient
    sums products over all rows, and 0 times NaN is NaN. So a zero gradient for these rows is not
    enough: every activation in them must have a value, and their losses are removed by selection,
    not by a factor 0.

    A context-parallel rank has its rows of every document, and its share of the microbatch's loss.
    """

    def __init__(
        self, config: Config, shape: PackedShape, device: torch.device, model_config: Any
    ) -> None:
        self.shape = shape
        self._device = device
        self._has_experts = config.moe.num_moe_experts is not None
        self._has_states = config.model.hybrid_layer_pattern is not None
        self._buckets = Buckets.of_model(
            shape, config.packing.buckets, config.seq_buckets, model_config
        )
        # Microbatches of ranks that share experts pass through a chunk together.
        shares = config.pipeline.expert_model_parallel_size > 1 and len(self._buckets.keys) > 1
        self._agree = agree_by_maximum() if shares else None
        self._chosen: dict[tuple[int, int], list[int]] = {}
        self._documents = _documents(config, shape)

    def schedule_options(self, step: int, count: int, *, has_graphs: bool) -> dict[str, Any]:
        """Return the keywords of the schedule that Megatron's schedule does not have."""
        buckets = self.buckets(step, count)
        if has_graphs:
            return {"packings": self.packings(step, count), "buckets": buckets}
        return {} if buckets is None else {"buckets": buckets}

    def num_microbatches(self, _step: int, count: int) -> int:
        """Return ``count``."""
        return count

    def packings(self, step: int, num_microbatches: int) -> list[tuple[int, ...]]:
        """Return the document lengths of the step's microbatches, for this data-parallel rank."""
        rank = _data_parallel_rank()
        return [self._documents.lengths(step, m, rank) for m in range(num_microbatches)]

    def buckets(self, step: int, num_microbatches: int) -> list[int] | None:
        """Return the rows of each microbatch; None if there is one length.

        All ranks call this for the same steps in the same order.
        """
        if len(self._buckets.keys) == 1:
            return None
        key = (step, num_microbatches)
        if key not in self._chosen:
            packings = self.packings(step, num_microbatches)
            while len(self._chosen) >= _NUM_CHOSEN:
                del self._chosen[next(iter(self._chosen))]
            self._chosen[key] = self._buckets.choose(packings, self._agree)
        return self._chosen[key]

    def close(self) -> None:
        """Destroy the process group of the agreement."""
        if self._agree is not None:
            self._agree.close()

    def step(self, step: int, num_microbatches: int) -> Iterator[Batch]:
        """Draw the step's microbatches, for one chunk."""
        rank = _data_parallel_rank()
        buckets = self.buckets(step, num_microbatches)
        for microbatch in range(num_microbatches):
            row = self._documents.row(step, microbatch, rank)
            tokens = self._buckets.keys[0] if buckets is None else buckets[microbatch]
            shape = self._buckets.shape_of(row.lengths, tokens)
            if reason_not_to_fit(row.lengths, shape) is not None:
                # It never has too many tokens: they were drawn for this shape.
                seqs = max(shape.max_packed_seqs, len(row.lengths) + 1)
                shape = replace(shape, max_packed_seqs=seqs, max_document_tokens=None)
            packed = pack(row.lengths, shape, where=f"step {step}, microbatch {microbatch}")
            yield self._batch(packed, row)

    def _batch(self, packed: PackedSequences, row: DocumentRow) -> Batch:
        """Return this rank's rows of a microbatch."""
        values = {
            "tokens": packed.place(row.tokens),
            "labels": packed.place(row.labels),
            "position_ids": packed.position_ids,
            "is_counted": ~packed.padding_mask,
        }
        if self._has_experts:  # only experts read it, and slots would keep copies
            values["padding_mask"] = packed.padding_mask
        size = packed.shape.context_parallel_size
        if size > 1:
            rank = import_megatron("megatron.core.parallel_state").get_context_parallel_rank()
            rows = packed.rows_of_rank(rank)
            values = {name: value[rows] for name, value in values.items()}
        batch: Batch = {name: sent(value[None], self._device) for name, value in values.items()}
        if size > 1:
            batch["num_counted"] = packed.num_valid_tokens
        batch["packed_seq_params"] = make_params(
            packed, self._device, with_seq_idx=self._has_states
        )
        return batch


def sequence_batches(
    config: Config, text: PackedText, step: int, num_microbatches: int, device: torch.device
) -> Iterator[Batch]:
    """Draw the step's microbatches for this data- and context-parallel rank.

    Each chunk draws them again.
    """
    dp_rank = _data_parallel_rank()
    cp_rank = import_megatron("megatron.core.parallel_state").get_context_parallel_rank()
    cp_size = config.pipeline.context_parallel_size
    masked = _has_mask(config, device)
    for microbatch in range(num_microbatches):
        whole = text.batch(step, microbatch, config.train.micro_batch_size, dp_rank)
        batch = whole.part(cp_rank, cp_size)
        arrays: dict[str, NDArray[Any]] = {
            "tokens": batch.tokens,
            "labels": batch.labels,
            "loss_mask": batch.loss_mask,
            "position_ids": batch.position_ids,
        }
        if cp_size > 1:
            arrays["num_labels"] = np.array(whole.num_labels, dtype=np.float32)
        if masked:
            arrays["attention_mask"] = batch.attention_mask()
        yield {name: sent(array, device) for name, array in arrays.items()}


def _data_parallel_rank() -> int:
    return import_megatron("megatron.core.parallel_state").get_data_parallel_rank()


def _has_mask(config: Config, device: torch.device) -> bool:
    """Return whether attention gets a mask that separates the documents of a sequence.

    Transformer Engine's causal kernel takes no mask.
    """
    spec = config.model.layer_spec
    return spec != "transformer_engine" and not (spec == "auto" and device.type == "cuda")
