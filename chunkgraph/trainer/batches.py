"""Draw a run's microbatches on this rank: sequences of one text, or packed whole documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chunkgraph.data import DocumentRow, Documents, DrawnDocuments, PackedText
from chunkgraph.engine.decide.maximum import Maximum
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.collectives import agree_by_maximum
from chunkgraph.megatron.features.contexts import ContextGroups
from chunkgraph.megatron.features.packing.attention_limits import shares_keys
from chunkgraph.megatron.features.packing.bank import PackedBank
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.options import PackingOptions
from chunkgraph.megatron.features.packing.params import make_params, to_device
from chunkgraph.packing import (
    ContextLimits,
    PackedShape,
    SmallestSizes,
    pack,
    reason_not_to_fit,
    schedule_contexts,
)
from chunkgraph.settings import Config

__all__ = [
    "PackedBatches",
    "SequenceBatches",
    "context_limits",
    "make_batches",
    "packed_shape",
    "sequence_batches",
]

Batch = dict[str, Any]

_NUM_REMEMBERED = 4
"""Steps that are remembered: this one, and the next, which is announced."""


def packed_shape(config: Config, model_config: Any = None) -> PackedShape | None:
    """Return the fixed shape of the run's packed microbatches.

    Padding counts as tokens if heads share keys (see `needs_tokens_in_pieces`).

    Args:
        config: the run.
        model_config: Megatron's TransformerConfig, if documents are packed into the shape.

    Returns:
        The shape; None without packing, or if microbatches differ in their context-parallel size.
    """
    if not config.packing.max_packed_seqs or config.packing.context_parallel_sizes:
        return None
    return PackedShape(
        config.packing.max_packed_seqs,
        config.tokens_per_sequence,
        context_parallel_size=config.pipeline.context_parallel_size,
        counts_padding=model_config is not None and shares_keys(model_config),
    )


def context_limits(config: Config, model_config: Any) -> ContextLimits:
    """Return the limits of every schedule of a run whose context-parallel size changes.

    Args:
        config: the run.
        model_config: Megatron's TransformerConfig.
    """
    packing, pipeline = config.packing, config.pipeline
    return ContextLimits(
        world_size=pipeline.data_parallel_size,
        max_tokens_per_rank=config.tokens_per_sequence,
        max_packed_seqs=packing.max_packed_seqs,
        sizes=packing.context_parallel_sizes,
        multiple_of=pipeline.microbatch_group_size if pipeline.num_model_chunks > 1 else 1,
        counts_padding=shares_keys(model_config),
    )


def _banks(config: Config, model_config: Any) -> PackedBanks:
    """Make the banks of a run with packed documents. All ranks call it together."""
    packing = config.packing
    shape = packed_shape(config, model_config)
    if shape is not None:
        options = PackingOptions(shape, packing.buckets, packing.seq_buckets)
        return PackedBanks.of_model(options, model_config)
    limits = context_limits(config, model_config)
    has_experts = config.moe.num_moe_experts is not None
    return PackedBanks.of_limits(
        limits,
        ContextGroups.of_data_parallel(limits.group_sizes, has_experts=has_experts),
        seq_buckets=packing.seq_buckets,
    )


def make_batches(
    config: Config, device: torch.device, model_config: Any
) -> SequenceBatches | PackedBatches:
    """Create the source of the run's microbatches. All ranks call this together.

    Args:
        config: the run.
        device: this rank's device.
        model_config: Megatron's TransformerConfig.
    """
    if config.packing.max_packed_seqs:
        return PackedBatches(config, device, model_config)
    return SequenceBatches(config, device)


def _documents(config: Config, shape: PackedShape) -> Documents | DrawnDocuments:
    path, counts = config.data.path, config.data.document_counts
    # Where sizes change, documents of a row go to ranks and groups of any size.
    multiple = 1 if config.packing.context_parallel_sizes else shape.document_multiple
    rows = {
        "num_tokens": shape.max_packed_tokens,
        "seed": config.train.seed,
        "multiple": multiple,
    }
    if counts:
        return DrawnDocuments.from_file(path, counts, **rows)
    return Documents.from_file(path, **rows)


class SequenceBatches:
    """Sequences of one length, cut from all documents end to end."""

    banks: None = None

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


@dataclass(frozen=True)
class _Microbatch:
    """Whole documents that the ranks of one context-parallel group share.

    Attributes:
        bank: the shape that they are packed into, and the group.
        lengths: tokens of each document; none: a filler, which only keeps ranks in step.
        draw: draws the documents.
    """

    bank: PackedBank
    lengths: Sequence[int]
    draw: Callable[[], DocumentRow]


@dataclass(frozen=True)
class _Step:
    """A step of this rank.

    Attributes:
        microbatches: its microbatches.
        options: keywords of the schedule that chunk graphs need.
        eager_options: keywords that eager steps need, too.
        loss_scale: makes the sum of a microbatch's losses a share of the step's mean; None: the
            loss is the mean over each microbatch.
    """

    microbatches: Sequence[_Microbatch]
    options: dict[str, Any]
    eager_options: dict[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None


class PackedBatches:
    """Whole documents in one row, with their offsets.

    Everything is computed on the host and copied to the device. A microbatch that does not fit the
    shape gets longer offsets, and its step runs eagerly.

    The rows after the documents hold token 0, whose activations are finite. A weight's gradient
    sums products over all rows, and 0 times NaN is NaN. So a zero gradient for these rows is not
    enough: every activation in them must have a value, and their losses are removed by selection,
    not by a factor 0.

    A context-parallel rank has its rows of every document, and its share of the microbatch's loss.
    Where context-parallel sizes change, one, two, four, ... of the data-parallel ranks share a
    microbatch. All of them draw the documents of the whole step, and so find the same schedule. The
    loss of each microbatch is then a share of the step's mean over all tokens, however they are
    spread.

    Args:
        config: the run.
        device: this rank's device.
        model_config: Megatron's TransformerConfig.

    Attributes:
        banks: what microbatches are packed into.
    """

    def __init__(self, config: Config, device: torch.device, model_config: Any) -> None:
        self._config = config
        self._device = device
        self._agree: Maximum | None = None
        self.banks = _banks(config, model_config)
        if self.banks.groups is None and config.pipeline.expert_model_parallel_size > 1:
            # Ranks that share experts run their microbatches through a chunk together.
            self._agree = agree_by_maximum() if len(self.banks.shapes) > 1 else None
        self._documents = _documents(config, self.banks.largest_shape)
        self._steps: dict[tuple[int, int], _Step] = {}

    def schedule_options(self, step: int, count: int, *, has_graphs: bool) -> dict[str, Any]:
        """Return keywords of the schedule that Megatron's own does not take."""
        contents = self._step(step, count)
        return {**contents.eager_options, **(contents.options if has_graphs else {})}

    def num_microbatches(self, step: int, count: int) -> int:
        """Return the step's microbatches, if the documents are those of ``count`` full ones."""
        return len(self._step(step, count).microbatches)

    def packings(self, step: int, count: int) -> list[Sequence[int]]:
        """Return the document lengths of the step's microbatches, for this rank."""
        return [microbatch.lengths for microbatch in self._step(step, count).microbatches]

    def buckets(self, step: int, count: int) -> list[int] | None:
        """Return the rows of each microbatch, if ranks agree on one of several lengths.

        All ranks call this for the same steps in the same order.
        """
        return self._step(step, count).eager_options.get("buckets")

    def close(self) -> None:
        """Destroy the process groups that ranks agreed in, or shared microbatches."""
        if self._agree is not None:
            self._agree.close()
        if self.banks.groups is not None:
            self.banks.groups.close()

    def step(self, step: int, count: int) -> Iterator[Batch]:
        """Draw this rank's rows of the step's microbatches, for one chunk."""
        contents = self._step(step, count)
        for number, microbatch in enumerate(contents.microbatches):
            batch = self._batch(microbatch, f"step {step}, microbatch {number}")
            if contents.loss_scale is not None:
                batch["loss_scale"] = contents.loss_scale
            yield batch

    # -- what a step holds ---------------------------------------------------------------------

    def _step(self, step: int, count: int) -> _Step:
        key = (step, count)
        if key not in self._steps:
            while len(self._steps) >= _NUM_REMEMBERED:
                del self._steps[next(iter(self._steps))]
            is_fixed = self.banks.groups is None
            self._steps[key] = (self._fixed_step if is_fixed else self._scheduled_step)(step, count)
        return self._steps[key]

    def _fixed_step(self, step: int, count: int) -> _Step:
        """Draw a step whose microbatches each data-parallel rank has for itself."""
        documents, banks, rank = self._documents, self.banks, _data_parallel_rank()
        packings = [documents.lengths(step, number, rank) for number in range(count)]
        rows = banks.choose(packings, self._agree)
        shapes = banks.by_rows
        microbatches = [
            _Microbatch(
                banks.fewest_sequences(lengths, shapes[num_rows]),
                lengths,
                partial(documents.row, step, number, rank),
            )
            for number, (lengths, num_rows) in enumerate(zip(packings, rows, strict=True))
        ]
        has_lengths = len(shapes) > 1
        return _Step(
            microbatches,
            {"packings": packings, "buckets": rows if has_lengths else None},
            {"buckets": rows} if has_lengths else {},
        )

    def _scheduled_step(self, step: int, count: int) -> _Step:
        """Draw a step whose documents are spread over all data-parallel ranks."""
        limits, groups = self.banks.limits, self.banks.groups
        assert limits is not None
        assert groups is not None
        documents: list[DocumentRow] = []
        for number in range(count * limits.world_size // limits.group_sizes[0]):
            row = self._documents.row(step, number)
            ends = np.cumsum(row.lengths)[:-1]
            parts = zip(np.split(row.tokens, ends), np.split(row.labels, ends), strict=True)
            documents += [DocumentRow(tokens, labels, (len(tokens),)) for tokens, labels in parts]
        lengths = [len(document.tokens) for document in documents]
        schedule = schedule_contexts(lengths, limits, SmallestSizes())
        banks = self.banks.of_schedule(schedule, lengths)
        microbatches = [
            _Microbatch(
                bank,
                [lengths[d] for d in mine.documents],
                partial(_joined, [documents[d] for d in mine.documents]),
            )
            for mine, bank in zip(schedule.of_rank(groups.rank), banks, strict=True)
        ]
        scale = schedule.num_microbatches * limits.world_size / sum(lengths)
        return _Step(microbatches, {"contexts": banks}, loss_scale=scale)

    # -- one microbatch ------------------------------------------------------------------------

    def _batch(self, microbatch: _Microbatch, where: str) -> Batch:
        """Return this rank's rows of a microbatch."""
        row, bank, groups = microbatch.draw(), microbatch.bank, self.banks.groups
        packed = pack(row.lengths, self._shape_for(row.lengths, bank), where=where)
        is_counted = ~packed.padding_mask
        if not microbatch.lengths:  # the one token of a filler does not count
            is_counted = np.zeros_like(is_counted)
        values = {
            "tokens": packed.place(row.tokens),
            "labels": packed.place(row.labels),
            "position_ids": packed.position_ids,
            "is_counted": is_counted,
        }
        if self._config.moe.num_moe_experts is not None:
            # Only experts read it, and slots would keep copies.
            values["padding_mask"] = ~is_counted
        if bank.size > 1:
            rank = _context_parallel_rank() if groups is None else groups.rank % bank.size
            rows = packed.rows_of_rank(rank)
            values = {name: value[rows] for name, value in values.items()}
        batch: Batch = {
            name: to_device(value[None], self._device) for name, value in values.items()
        }
        if bank.size > 1:
            batch["num_counted"] = packed.num_valid_tokens
        has_states = self._config.model.hybrid_layer_pattern is not None
        params = make_params(packed, self._device, with_seq_idx=has_states)
        if groups is not None:
            params.cp_group, params.local_cp_size = bank.group, bank.size
        batch["packed_seq_params"] = params
        return batch

    def _shape_for(self, lengths: Sequence[int], bank: PackedBank) -> PackedShape:
        """Return the shape to pack documents into, with room for those that do not fit."""
        shape = bank.shape
        if reason_not_to_fit(lengths, shape) is None:
            return shape
        # The tokens always fit: they were drawn for this shape.
        seqs = max(shape.max_packed_seqs, len(lengths) + 1)
        return replace(shape, max_packed_seqs=seqs, max_document_tokens=None)


def _joined(documents: Sequence[DocumentRow]) -> DocumentRow:
    """Return documents end to end; for a filler, one token."""
    filler = DocumentRow(np.zeros(1, np.int64), np.zeros(1, np.int64), (1,))
    every = documents or [filler]
    return DocumentRow(
        np.concatenate([document.tokens for document in every]),
        np.concatenate([document.labels for document in every]),
        tuple(len(document.tokens) for document in every),
    )


def sequence_batches(
    config: Config, text: PackedText, step: int, num_microbatches: int, device: torch.device
) -> Iterator[Batch]:
    """Draw the step's microbatches for this data- and context-parallel rank.

    Each chunk draws them again.
    """
    dp_rank = _data_parallel_rank()
    cp_rank = _context_parallel_rank()
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
        yield {name: to_device(array, device) for name, array in arrays.items()}


def _data_parallel_rank() -> int:
    return import_megatron("megatron.core.parallel_state").get_data_parallel_rank()


def _context_parallel_rank() -> int:
    return import_megatron("megatron.core.parallel_state").get_context_parallel_rank()


def _has_mask(config: Config, device: torch.device) -> bool:
    """Return whether attention gets a mask that separates the documents of a sequence.

    Transformer Engine's causal kernel takes no mask.
    """
    spec = config.model.layer_spec
    return spec != "transformer_engine" and not (spec == "auto" and device.type == "cuda")
