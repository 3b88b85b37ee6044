"""The banks of packed microbatches: context-parallel sizes, lengths and numbers of sequences.

A fixed context-parallel size is the special case of a single size. Attention launches work for
every sequence that a microbatch may have, empty or not. So room for many documents costs time even
if there are few, and graphs for fewer sequences are worthwhile.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chunkgraph.engine import Agree
from chunkgraph.errors import ConfigError, PackingError
from chunkgraph.megatron.features.packing.bank import (
    PackedBank,
    PackingOptions,
    ScheduledBanks,
    with_cut_offsets,
)
from chunkgraph.packing import (
    ContextLimits,
    ContextSchedule,
    PackedShape,
    bucket_multiple,
    reason_not_to_fit,
    smallest_that_fits,
)
from chunkgraph.packing.seq_counts import default_buckets_of_shape, default_seq_buckets

if TYPE_CHECKING:
    from chunkgraph.megatron.features.contexts.groups import ContextGroups


class PackedBanks:
    """The banks of one rank: one for each context-parallel size, length and number of sequences.

    Either sizes or lengths differ; all have the same numbers of sequences. A microbatch gets the
    shortest length that holds its documents, and for that length the fewest sequences. Ranks must
    agree on lengths, because they exchange tensors of these lengths, but not on numbers of
    sequences.

    Args:
        shapes: Shapes of different lengths or sizes, with the most sequences; at least one.
        seq_buckets: Smaller numbers of sequences that have graphs too.
        fills_rows: Whether documents fill all rows of every microbatch.
        limits: Limits of the scheduler, if the context-parallel size changes.
        groups: This rank's groups of all sizes; None if there is one size with the model's group.

    Attributes:
        keys: The captured banks, largest first.
        shapes: The packed shapes with the most sequences, largest first.
        fills_rows: See above; if False, rows after the documents are kept from experts.
        limits: See above.
        groups: See above.

    Raises:
        ConfigError: A number of sequences is not at least 2 and below that of the shapes.
    """

    def __init__(
        self,
        shapes: Sequence[PackedShape],
        seq_buckets: Sequence[int] = (),
        *,
        fills_rows: bool = False,
        limits: ContextLimits | None = None,
        groups: ContextGroups | None = None,
    ) -> None:
        self.shapes = tuple(
            sorted(shapes, key=lambda s: (-s.context_parallel_size, -s.max_packed_tokens))
        )
        most = self.largest_shape.max_packed_seqs
        for count in seq_buckets:
            if isinstance(count, bool) or not isinstance(count, int) or not 2 <= count < most:
                raise ConfigError(
                    f"seq_buckets contains {count!r}; entries must be whole numbers from 2 and "
                    f"below max_packed_seqs ({most})."
                )
        self.seq_counts = tuple(sorted({*seq_buckets, most}, reverse=True))
        self.fills_rows = fills_rows
        self.limits = limits
        self.groups = groups
        # For each shape a bank for each number of sequences, the largest number first.
        self._banks: dict[PackedShape, list[PackedBank]] = {}
        with_seqs = ", {} sequences" if self.has_fewer_sequences else ""
        for shape in self.shapes:
            size, tokens = shape.context_parallel_size, f"{shape.max_packed_tokens} tokens"
            group = groups and groups.of(size)
            name = f"CP {size} with {shape.tokens_per_rank} tokens a rank" if groups else tokens
            self._banks[shape] = [
                PackedBank(
                    replace(shape, max_packed_seqs=seqs), group, f"{name}{with_seqs.format(seqs)}"
                )
                for seqs in self.seq_counts
            ]
        self.keys = tuple(bank for banks in self._banks.values() for bank in banks)

    @classmethod
    def of_model(cls, packing: PackedShape | PackingOptions, config: Any) -> PackedBanks:
        """Create the banks of one context-parallel size, with lengths that the ranks can share.

        With FP8, lengths are multiples of 16 rows on each rank.

        Args:
            packing: The largest shape, alone or with shorter lengths and fewer sequences.
            config: Megatron's TransformerConfig, or its arguments.

        Raises:
            PackingError: The ranks cannot share the largest or a shorter length.
            ConfigError: A number of sequences is not at least 2 and below that of the shape.
        """
        options = PackingOptions(packing) if isinstance(packing, PackedShape) else packing
        shape, buckets, seq_buckets = options.shape, options.buckets, options.seq_buckets
        if seq_buckets is None:
            # Of the lengths as requested: rounding them must not change the default.
            seq_buckets = default_buckets_of_shape(shape, buckets)
        in_fp8 = bool(buckets and getattr(config, "fp8", None))
        is_shared = getattr(config, "sequence_parallel", False)
        tensor_ranks = getattr(config, "tensor_model_parallel_size", None) or 1
        multiple = bucket_multiple(
            shape.context_parallel_size,
            sequence_parallel_size=tensor_ranks if is_shared else 1,
            in_fp8=in_fp8,
        )
        if in_fp8 and shape.max_packed_tokens % multiple:
            raise PackingError(
                f"max_packed_tokens is {shape.max_packed_tokens}, with shorter ones. In FP8 "
                "Transformer Engine needs multiples of 16 rows on each rank: use a multiple of "
                f"{multiple}, or no shorter ones."
            )
        shapes = shape.buckets(buckets, multiple_of=multiple)
        return cls(shapes, seq_buckets, fills_rows=options.fills_rows)

    @classmethod
    def of_limits(
        cls,
        limits: ContextLimits,
        groups: ContextGroups,
        *,
        seq_buckets: Sequence[int] | None = None,
    ) -> PackedBanks:
        """Create the banks for context-parallel sizes that change between microbatches.

        Args:
            limits: Limits of the scheduler.
            groups: This rank's groups of all sizes of the limits.
            seq_buckets: Smaller numbers of sequences that are captured too, for every size; None
                for `default_seq_buckets`.
        """
        if seq_buckets is None:
            seq_buckets = default_seq_buckets(limits.max_packed_seqs, limits.max_tokens_per_rank)
        shapes = [limits.shape(size) for size in limits.group_sizes]
        return cls(shapes, seq_buckets, limits=limits, groups=groups)

    def __str__(self) -> str:
        """Return what must be the same on all ranks."""
        within = "" if self.limits is None else f" within {self.limits}"
        return f"{[*self.shapes]} with {self.seq_counts} sequences{within}"

    @property
    def largest_shape(self) -> PackedShape:
        """Return the shape that no microbatch exceeds."""
        return self.shapes[0]

    @property
    def by_rows(self) -> Mapping[int, PackedShape]:
        """Return the shapes of one context-parallel size by their rows, largest first."""
        return {shape.max_packed_tokens: shape for shape in self.shapes}

    @property
    def has_fewer_sequences(self) -> bool:
        """Return whether there are graphs for fewer sequences than the most."""
        return len(self.seq_counts) > 1

    def fewest_sequences(self, lengths: Sequence[int], shape: PackedShape) -> PackedBank:
        """Return the bank of a shape with the fewest sequences for these documents.

        Args:
            lengths: Tokens of each document; the shape may have too few rows for them.
            shape: One of `shapes`.
        """
        banks = self._banks[shape]
        sufficient = [bank for bank in banks if len(lengths) <= bank.shape.max_documents]
        return sufficient[-1] if sufficient else banks[0]

    def most_sequences(self, shape: PackedShape) -> PackedBank:
        """Return the bank of a shape for a microbatch with unknown documents."""
        return self._banks[shape][0]

    def choose(self, packings: Sequence[Sequence[int]], agree: Agree | None = None) -> list[int]:
        """Choose the rows of the smallest shape that each microbatch fits.

        If none fits, the result has the rows of the largest.

        Args:
            packings: For each microbatch, the tokens of each document.
            agree: Element-wise maximum over ranks that share experts, whose microbatches go
                through a chunk together. These ranks must have the same number of microbatches.
        """
        rows = [
            (smallest_that_fits(lengths, self.shapes) or self.largest_shape).max_packed_tokens
            for lengths in packings
        ]
        return rows if agree is None else agree(rows)

    def of_schedule(self, schedule: ContextSchedule, lengths: Sequence[int]) -> ScheduledBanks:
        """Return the bank of each microbatch of this rank, alike on all ranks of its group.

        If a step receives this list unmodified, it checks that all ranks use the same schedule.

        Args:
            schedule: Schedule of the step.
            lengths: Tokens of each document of the global batch.

        Raises:
            ConfigError: A microbatch fits no bank.
        """
        assert self.groups is not None
        shapes = {shape.context_parallel_size: shape for shape in self.shapes}
        banks = []
        for microbatch in schedule.of_rank(self.groups.rank):
            documents = [lengths[d] for d in microbatch.documents] or [1]
            shape = shapes[microbatch.size]
            if reason_not_to_fit(documents, shape) is not None:
                raise ConfigError(
                    f"the bank of {microbatch.size} ranks does not hold a microbatch with "
                    f"documents of {documents} tokens"
                )
            banks.append(self.fewest_sequences(documents, shape))
        plan = repr((schedule.digest, [int(length) for length in lengths]))
        return ScheduledBanks(banks, zlib.crc32(plan.encode()))

    def with_offsets_of(self, bank: Hashable, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return a chunk's arguments with uncut offsets cut to the sequences of ``bank``.

        Other offsets are unchanged, such as those of `packed_shapes`, or of a step that does not
        fit. The cut loses no document: a microbatch of the bank has fewer documents, and its last
        sequence ends at the last row.
        """
        if not isinstance(bank, PackedBank) or bank not in self.keys:
            return kwargs
        return with_cut_offsets(kwargs, self.seq_counts[0], bank.shape.max_packed_seqs)
