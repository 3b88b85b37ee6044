"""Which bank each microbatch of a schedule belongs to, and what calls of a bank look like."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from chunkgraph.engine import Agree
from chunkgraph.errors import ConfigError, ReplayMismatchError
from chunkgraph.megatron.features.contexts.groups import ContextGroups
from chunkgraph.megatron.features.contexts.key import ContextBank, ScheduledBanks
from chunkgraph.megatron.features.packing import params as packed
from chunkgraph.megatron.features.packing.banks import (
    ROWS_AT,
    check_seq_counts,
    filled_offsets,
    resized,
    with_cut_offsets,
)
from chunkgraph.packing import (
    ContextLimits,
    ContextSchedule,
    PackedShape,
    reason_not_to_fit,
)
from chunkgraph.packing.seq_counts import default_seq_buckets

__all__ = ["ContextBanks"]

_GROUPS = ("cp_group", f"{packed.ARGUMENT}.cp_group")
_SIZES = ("cp_size", f"{packed.ARGUMENT}.local_cp_size")
_PARAMS = f"{packed.ARGUMENT}."


class ContextBanks:
    """The banks of one rank: one for each size, length bucket, number of sequences and variant.

    Args:
        limits: of the scheduler.
        groups: of this rank, for all sizes of the limits.
        cuda_graph_cp_sizes: the sizes that are captured; empty: all. Steps with another one run
            eagerly as a whole.
        buckets: shorter lengths that are captured too, in rows of a rank.
        seq_buckets: fewer sequences than the limits allow that are captured too, for every size
            and length; a microbatch gets the fewest that hold its documents. None:
            `default_seq_buckets`.
        variants: what else graphs differ by.

    Attributes:
        fills_rows: False: rows after the documents are kept from experts.

    Raises:
        ConfigError: a size that no microbatch has, or a bucket that is none.
    """

    fills_rows = False

    def __init__(
        self,
        limits: ContextLimits,
        groups: ContextGroups,
        *,
        cuda_graph_cp_sizes: Sequence[int] = (),
        buckets: Sequence[int] = (),
        seq_buckets: Sequence[int] | None = None,
        variants: Sequence[str] = ("",),
    ) -> None:
        unknown = sorted(set(cuda_graph_cp_sizes) - set(limits.group_sizes))
        if unknown:
            raise ConfigError(
                f"cuda_graph_cp_sizes has {unknown}, but microbatches have one of the sizes "
                f"{list(limits.group_sizes)}."
            )
        most = limits.max_tokens_per_rank
        wrong = [b for b in buckets if not 0 < b <= most or (b % 2 and limits.world_size > 1)]
        if wrong:
            raise ConfigError(
                f"buckets has {wrong}; buckets are even numbers of rows up to {most}, those of a "
                "rank."
            )
        if seq_buckets is None:
            seq_buckets = default_seq_buckets(limits.max_packed_seqs, min((most, *buckets)))
        check_seq_counts(seq_buckets, limits.max_packed_seqs)
        self.limits = limits
        self.groups = groups
        self._tokens = tuple(sorted({most, *buckets}, reverse=True))
        seq_counts = (None, *sorted(set(seq_buckets), reverse=True))
        captured = set(cuda_graph_cp_sizes or limits.group_sizes)
        self._every = tuple(
            ContextBank(size, groups.of(size), tokens, variant, count)
            for size in limits.group_sizes
            for tokens in self._tokens
            for count in seq_counts
            for variant in variants
        )
        self.keys = tuple(key for key in self._every if key.size in captured)
        # By bank: how many sequences offsets of the most tell of, and offsets of its own.
        self._num_sequences = {
            key: (
                self.shape(replace(key, max_packed_seqs=None)).num_sequences,
                self.shape(key).num_sequences,
            )
            for key in self._every
        }

    def shape(self, key: ContextBank) -> PackedShape:
        """What microbatches of a bank are packed into."""
        limit = self.limits.max_document_tokens
        total = key.num_packed_tokens
        return PackedShape(
            key.max_packed_seqs or self.limits.max_packed_seqs,
            total,
            key.size,
            None if limit is None else min(limit, total),
            self.limits.counts_padding,
        )

    @property
    def largest_shape(self) -> PackedShape:
        """What microbatches of the largest size are packed into."""
        return self.limits.shape(self.limits.group_sizes[0])

    def limit_slots(self, num_slots: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many of the slots microbatches of any one bank can ever take at once."""
        return self.limits.num_slots(num_slots)

    @property
    def has_fewer_sequences(self) -> bool:
        """Whether there are graphs for fewer sequences than the limits allow."""
        return any(key.max_packed_seqs is not None for key in self.keys)

    def with_offsets_of(self, bank: Hashable, kwargs: dict[str, Any]) -> dict[str, Any]:
        """See `Buckets.with_offsets_of`."""
        assert isinstance(bank, ContextBank)
        return with_cut_offsets(kwargs, *self._num_sequences.get(bank, (0, 0)))

    def of_schedule(
        self, schedule: ContextSchedule, lengths: Sequence[int], variant: str = ""
    ) -> ScheduledBanks:
        """The bank of each microbatch of this rank, alike on all ranks of its group.

        Steps that are given these, as they are, make sure that all ranks have them of one schedule.

        Args:
            schedule: of the step.
            lengths: tokens of each document of the global batch.
            variant: of the step.
        """
        keys = []
        for microbatch in schedule.of_rank(self.groups.rank):
            own = [lengths[d] for d in microbatch.documents] or [1]
            fitting = [
                key
                for key in self._every
                if (key.size, key.variant) == (microbatch.size, variant)
                and reason_not_to_fit(own, self.shape(key)) is None
            ]
            if not fitting:
                raise ConfigError(
                    f"no bank of {microbatch.size} ranks and variant {variant!r} holds a "
                    f"microbatch with documents of {own} tokens"
                )
            keys.append(min(fitting, key=lambda k: (k.num_tokens, self.shape(k).max_packed_seqs)))
        told = repr((schedule.digest, [int(length) for length in lengths], variant))
        return ScheduledBanks(keys, zlib.crc32(told.encode()))

    def refuse_others(self, rank: int, agree: Agree | None) -> None:
        """Make sure that all ranks have these limits, sizes and lengths; all of them call it.

        Args:
            rank: named in errors.
            agree: maximum over all ranks; None in a job of one.

        Raises:
            ConfigError: on all ranks: another one has others.
        """
        captured = [key.name for key in self.keys]
        told = repr((self.limits, [key.name for key in self._every], captured))
        digest = zlib.crc32(told.encode())
        if agree is not None and agree([digest, -digest]) != [digest, -digest]:
            raise ConfigError(
                f"rank {rank}: banks of {list(self.keys)} within {self.limits}, and others on "
                "another rank. Give every rank the same limits, sizes and buckets, pipeline stages "
                "included."
            )

    def check(self, keys: Sequence[ContextBank]) -> None:
        """Make sure that microbatches use the process groups that graphs were captured with.

        Raises:
            ReplayMismatchError: one uses another group, be it of the same ranks.
        """
        own = {key.name: key.group for key in self._every}
        for number, key in enumerate(keys):
            if key.name in own and own[key.name] is not key.group:
                raise ReplayMismatchError(
                    f"Microbatch {number} ({key}) has another process group than the graphs of "
                    "that size, which hold the communicator that they were captured with. Use the "
                    "groups of these banks, or release the graphs and make others."
                )

    def derive(
        self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any], of: Hashable, wanted: Hashable
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A chunk's arguments as a microbatch of the bank ``wanted`` would have them.

        The group and what counts rows or ranks is replaced; rows are left out or filled with 0.

        Raises:
            ConfigError: an argument that is not known counts rows.
        """
        assert isinstance(of, ContextBank)
        assert isinstance(wanted, ContextBank)
        first, *others = args
        longest = (self.shape(of).longest_rows, self.shape(wanted).longest_rows)
        made = {n: _derived(c, n, value, of, wanted, longest) for n, value in kwargs.items()}
        if self.shape(of) != self.shape(wanted):
            # Its ranks may not be able to share the given ones, and passes before a capture really
            # run with them.
            made |= filled_offsets(kwargs, self.shape(wanted))
        rest = [
            _derived(c, f"argument {i}", v, of, wanted, longest) for i, v in enumerate(others, 1)
        ]
        return (resized(first, 0, of.num_tokens, wanted.num_tokens), *rest), made


def _derived(
    c: int, name: str, value: Any, of: ContextBank, wanted: ContextBank, longest: tuple[int, int]
) -> Any:
    if name in _GROUPS or (of.group is not None and value is of.group):
        return wanted.group
    if name in _SIZES:
        return wanted.size if value == of.size else value
    whole = (of.num_packed_tokens, wanted.num_packed_tokens)
    if name in ROWS_AT:
        sizes = longest if name.startswith("rotary_") else (of.num_tokens, wanted.num_tokens)
        if isinstance(value, (tuple, list)):
            return type(value)(resized(v, ROWS_AT[name], *sizes) for v in value)
        return resized(value, ROWS_AT[name], *sizes)
    if name.startswith(_PARAMS):
        if isinstance(value, int) and not isinstance(value, bool):
            return dict([whole, longest]).get(value, value)
        if name == f"{_PARAMS}seq_idx":
            return resized(value, 1, *whole)
        if isinstance(value, torch.Tensor):  # offsets: see `filled_offsets`
            return value
    changed = {a for a, b in (whole, (of.num_tokens, wanted.num_tokens)) if a != b}
    if isinstance(value, torch.Tensor) and changed & set(value.shape):
        raise ConfigError(
            f"Chunk {c} takes {name} of shape {tuple(value.shape)}, and it is not known how it "
            f"looks in the bank {wanted}, which no step before the capture had. Warm up with "
            "microbatches of every bank."
        )
    return value
