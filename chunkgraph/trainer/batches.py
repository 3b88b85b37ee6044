"""Draw a run's microbatches on this rank: sequences of one text, or packed whole documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from chunkgraph.data import END_OF_DOCUMENT, DocumentRow, Documents, PackedText, read_documents
from chunkgraph.megatron.core.access import import_megatron, private_names
from chunkgraph.megatron.core.agreement import agree_by_maximum
from chunkgraph.megatron.features.contexts import ContextGroups
from chunkgraph.megatron.features.packing.bank import PackedBank, PackingOptions
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.params import make_params, shares_keys, to_device
from chunkgraph.packing import (
    PackedShape,
    SmallestSizes,
    pack,
    reason_not_to_fit,
    schedule_contexts,
)
from chunkgraph.settings import Config

Batch = dict[str, Any]
"""A microbatch; `forward_step` lists its entries."""


class SequenceBatches:
    """Sequences of one length, cut from all documents end to end.

    Args:
        config: the run.
        device: this rank's device.

    Attributes:
        banks: what microbatches are packed into; None if nothing is packed.
    """

    banks: PackedBanks | None = None

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config
        self._device = device
        text, seq_length = read_documents(config.data.path), config.model.seq_length
        self._text = PackedText(text, seq_length=seq_length, seed=config.train.seed)

    def step(self, step: int, count: int) -> Iterator[Batch]:
        """Draw this data- and context-parallel rank's part of the step, for one chunk.

        Each document starts at position 0, and its first token is not a label. A mask separates the
        documents of a sequence, except for Transformer Engine, whose causal kernel takes no mask.
        """
        config, device = self._config, self._device
        state = import_megatron("megatron.core.parallel_state")
        dp_rank, cp_rank = state.get_data_parallel_rank(), state.get_context_parallel_rank()
        cp_size, size = config.pipeline.context_parallel_size, config.train.micro_batch_size
        (masks_of,) = private_names(
            "megatron.core.datasets.gpt_dataset", "_get_ltor_masks_and_position_ids"
        )
        spec = config.model.layer_spec
        on_engine = spec == "transformer_engine" or (spec == "auto" and device.type == "cuda")
        masking = (END_OF_DOCUMENT, True, True, True, not on_engine)
        for microbatch in range(count):
            rows = torch.from_numpy(self._text.batch(step, microbatch, size, dp_rank))
            tokens = rows[:, :-1]
            mask, loss_mask, positions = zip(*(masks_of(r, *masking) for r in tokens), strict=True)
            values = {
                "tokens": tokens,
                "labels": rows[:, 1:],
                "position_ids": torch.stack(positions),
                "is_counted": torch.stack(loss_mask).bool(),
            }
            if cp_size > 1:
                count_of_all = values["is_counted"].sum(dtype=torch.float32)
                values = {n: _part(value, cp_rank, cp_size) for n, value in values.items()}
                values["num_counted"] = count_of_all
            if not on_engine:
                values["attention_mask"] = torch.stack(mask)
            yield {n: to_device(value.contiguous().numpy(), device) for n, value in values.items()}

    def schedule_options(self, step: int, count: int) -> dict[str, Any]:
        """Return keywords of the schedule: ``num_microbatches``, and those of chunk graphs."""
        del step
        return {"num_microbatches": count}


def _part(rows: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return one context-parallel rank's part of every row, [b, s / size].

    Of ``2 * size`` equal pieces, a rank holds piece ``rank`` from the front and piece ``rank`` from
    the end, so all ranks have the same work under a causal mask.
    """
    pieces = rows.chunk(2 * size, dim=1)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim=1)


def _banks(config: Config, model_config: Any) -> PackedBanks:
    """Make the banks of a run with packed documents. All ranks call it together."""
    packing, pipeline = config.packing, config.pipeline
    # Padding counts if heads share keys (docs/packed_sequences.md).
    counts_padding = shares_keys(model_config)
    if not packing.context_parallel_sizes:
        shape = PackedShape(
            packing.max_packed_seqs,
            config.tokens_per_sequence,
            pipeline.context_parallel_size,
            counts_padding=counts_padding,
        )
        options = PackingOptions(shape, packing.buckets, packing.seq_buckets)
        return PackedBanks.of_model(options, model_config)
    limits = packing.limits(
        config.model.seq_length,
        pipeline.data_parallel_size,
        multiple_of=pipeline.microbatch_group_size if pipeline.num_model_chunks > 1 else 1,
        counts_padding=counts_padding,
    )
    has_experts = config.moe.num_moe_experts is not None
    groups = ContextGroups.of_data_parallel(limits.group_sizes, has_experts=has_experts)
    return PackedBanks.of_limits(limits, groups, seq_buckets=packing.seq_buckets)


@dataclass(frozen=True)
class _Step:
    """A step of this rank.

    Attributes:
        rows: the documents of each microbatch; no document: a filler, which only keeps ranks in
            step.
        banks: the shape that each microbatch is packed into, and the group that shares it.
        options: keywords of the schedule that chunk graphs need.
        loss_scale: makes the sum of a microbatch's losses a share of the step's mean; None: the
            loss is the mean over each microbatch.
    """

    rows: Sequence[DocumentRow]
    banks: Sequence[PackedBank]
    options: dict[str, Any]
    loss_scale: float | None = None


class PackedBatches(SequenceBatches):
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
        documents: the rows that are drawn.
    """

    banks: PackedBanks

    def __init__(self, config: Config, device: torch.device, model_config: Any) -> None:
        self._config = config
        self._device = device
        self.banks = _banks(config, model_config)
        is_fixed = self.banks.groups is None
        # Ranks that share experts run their microbatches through a chunk together.
        shares_experts = is_fixed and config.pipeline.expert_model_parallel_size > 1
        agrees = shares_experts and len(self.banks.shapes) > 1
        self._agree = agree_by_maximum() if agrees else None
        shape = self.banks.largest_shape
        self.documents = Documents(
            read_documents(config.data.path),
            num_tokens=shape.max_packed_tokens,
            seed=config.train.seed,
            # Where sizes change, documents of a row go to ranks and groups of any size.
            multiple=shape.document_multiple if is_fixed else 1,
        )
        draw = self._fixed_step if is_fixed else self._scheduled_step
        # Of this step, and of the next, which is announced.
        self._step = lru_cache(maxsize=4)(draw)

    def step(self, step: int, count: int) -> Iterator[Batch]:
        """Draw this rank's rows of the step's microbatches, for one chunk."""
        contents = self._step(step, count)
        for row, bank in zip(contents.rows, contents.banks, strict=True):
            batch = self._batch(row, bank)
            if contents.loss_scale is not None:
                batch["loss_scale"] = contents.loss_scale
            yield batch

    def schedule_options(self, step: int, count: int) -> dict[str, Any]:
        """Return keywords of the schedule; the documents are those of ``count`` full microbatches.

        ``packings``, ``buckets`` and ``contexts`` are those of `ChunkGraphs.announce`.
        """
        contents = self._step(step, count)
        return {"num_microbatches": len(contents.rows), **contents.options}

    def close(self) -> None:
        """Destroy the process groups that ranks agreed in, or shared microbatches."""
        for owner in (self._agree, self.banks.groups):
            if owner is not None:
                owner.close()

    def _fixed_step(self, step: int, count: int) -> _Step:
        """Draw a step whose microbatches each data-parallel rank has for itself."""
        dp_rank = import_megatron("megatron.core.parallel_state").get_data_parallel_rank()
        rows = [self.documents.row(step, number, dp_rank) for number in range(count)]
        packings = [row.lengths for row in rows]
        buckets = self.banks.choose(packings, self._agree)
        shapes = self.banks.by_rows
        banks = [
            self.banks.fewest_sequences(lengths, shapes[num_rows])
            for lengths, num_rows in zip(packings, buckets, strict=True)
        ]
        options = {"buckets": buckets} if len(shapes) > 1 else {}
        return _Step(rows, banks, {"packings": packings, **options})

    def _scheduled_step(self, step: int, count: int) -> _Step:
        """Draw a step whose documents are spread over all data-parallel ranks."""
        limits, groups = self.banks.limits, self.banks.groups
        assert limits is not None
        assert groups is not None
        num_rows = count * limits.world_size // limits.group_sizes[0]
        whole = [self.documents.row(step, number) for number in range(num_rows)]
        lengths = [length for row in whole for length in row.lengths]
        documents = np.split(np.concatenate([row.tokens for row in whole]), np.cumsum(lengths)[:-1])
        schedule = schedule_contexts(lengths, limits, SmallestSizes())
        banks = self.banks.of_schedule(schedule, lengths)
        rows = [
            DocumentRow.of_documents([documents[d] for d in mine.documents])
            for mine in schedule.of_rank(groups.rank)
        ]
        scale = schedule.num_microbatches * limits.world_size / sum(lengths)
        return _Step(rows, banks, {"contexts": banks}, loss_scale=scale)

    def _batch(self, row: DocumentRow, bank: PackedBank) -> Batch:
        """Return this rank's rows of a microbatch."""
        groups = self.banks.groups
        is_filler = not row.lengths
        if is_filler:  # it has one token, which does not count
            row = DocumentRow.of_documents([np.zeros(1, np.int64)])
        shape = bank.shape
        if reason_not_to_fit(row.lengths, shape) is not None:
            # The tokens fit, since they were drawn for this shape; documents get more offsets.
            num_seqs = max(shape.max_packed_seqs, len(row.lengths) + 1)
            shape = replace(shape, max_packed_seqs=num_seqs)
        packed = pack(row.lengths, shape)
        is_counted = ~packed.padding_mask & (not is_filler)
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
            state = import_megatron("megatron.core.parallel_state")
            cp_rank = state.get_context_parallel_rank() if groups is None else groups.rank
            rows = packed.rows_of_rank(cp_rank % bank.size)
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
