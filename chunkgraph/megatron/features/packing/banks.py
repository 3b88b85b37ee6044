"""Buckets: packed shapes of several lengths and numbers of sequences, each with its own graphs.

Attention's kernels are started for every sequence that a microbatch may have, empty or not. So
room for many documents costs time also where there are few, and graphs for fewer are worth having.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from chunkgraph.engine import Agree
from chunkgraph.errors import ConfigError, PackingError
from chunkgraph.megatron.features.packing import params as packed
from chunkgraph.megatron.features.packing.params import OFFSETS
from chunkgraph.packing import (
    PackedShape,
    bucket_multiple,
    bucket_shapes,
    pack,
    smallest_that_fits,
)

__all__ = [
    "ROWS_AT",
    "BankKey",
    "Buckets",
    "check_seq_counts",
    "filled_offsets",
    "resized",
    "with_cut_offsets",
]

BankKey = int | tuple[int, int]
"""Which graphs: tokens of the shape; with several numbers of sequences, tokens and sequences."""

ROWS_AT = {
    "input_ids": 1,
    "position_ids": 1,
    "labels": 1,
    "loss_mask": 1,
    "padding_mask": 1,
    "decoder_input": 0,
    "rotary_pos_emb": 0,
    "rotary_pos_cos": 0,
    "rotary_pos_sin": 0,
    "rotary_pos_cos_sin": 0,
}
"""Which dimension of an argument of Megatron's counts rows."""
_PARAMS = f"{packed.ARGUMENT}."
_OFFSET_ARGUMENTS = tuple(f"{_PARAMS}{name}" for name in OFFSETS)
_LONGEST = (f"{_PARAMS}max_seqlen_q", f"{_PARAMS}max_seqlen_kv")


class Buckets:
    """Which bucket a packed microbatch belongs to; buckets are called by their tokens.

    Every bucket has the same numbers of sequences, and a microbatch of a bucket gets the least that
    holds its documents. Ranks have to agree on tokens, which they exchange, not on sequences.

    Args:
        shapes: at least one, of different lengths and of the most sequences.
        seq_counts: fewer sequences that there are graphs for too.

    Raises:
        ConfigError: a number of sequences is not between 2 and that of the shapes.
    """

    def __init__(self, shapes: Sequence[PackedShape], seq_counts: Sequence[int] = ()) -> None:
        self.shapes = {
            shape.max_packed_tokens: shape
            for shape in sorted(shapes, key=lambda s: -s.max_packed_tokens)
        }
        if len(self.shapes) != len(shapes) or not shapes:
            raise ValueError(f"buckets are to be of different lengths, got {list(shapes)}")
        most = shapes[0].max_packed_seqs
        check_seq_counts(seq_counts, most)
        self.seq_counts = tuple(sorted({*seq_counts, most}, reverse=True))
        # By bank: how many sequences offsets of the most tell of, and offsets of its own.
        self._num_sequences: dict[Hashable, tuple[int, int]] = {
            self._bank(tokens, seqs): (
                shape.num_sequences,
                replace(shape, max_packed_seqs=seqs).num_sequences,
            )
            for tokens, shape in self.shapes.items()
            for seqs in self.seq_counts
        }

    @classmethod
    def of_model(
        cls,
        shape: PackedShape,
        sizes: Sequence[float],
        seq_counts: Sequence[int],
        config: Any,
    ) -> Buckets:
        """Those of lengths that the ranks of a model can share, shorter ones in sixteens with FP8.

        Args:
            shape: the largest.
            sizes: of the shorter ones; see `bucket_shapes`.
            seq_counts: fewer sequences that there are graphs for too.
            config: Megatron's TransformerConfig, or its arguments.

        Raises:
            PackingError: the largest has another length, or there are no such shorter ones.
            ConfigError: a number of sequences is not between 2 and that of the shape.
        """
        in_fp8 = bool(sizes and getattr(config, "fp8", None))
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
                "Transformer Engine takes rows in sixteens, on each rank: give a multiple of "
                f"{multiple}, or no shorter ones."
            )
        return cls(bucket_shapes(shape, sizes, multiple_of=multiple), seq_counts)

    @property
    def has_fewer_sequences(self) -> bool:
        """Whether there are graphs for fewer sequences than the most."""
        return len(self.seq_counts) > 1

    @property
    def keys(self) -> tuple[int, ...]:
        """Tokens of all buckets, largest first."""
        return tuple(self.shapes)

    @property
    def banks(self) -> tuple[BankKey, ...]:
        """Whatever has graphs of its own, largest first."""
        return tuple(self._bank(tokens, seqs) for tokens in self.keys for seqs in self.seq_counts)

    @property
    def all_shapes(self) -> tuple[PackedShape, ...]:
        """The shape of each of `banks`."""
        return tuple(
            replace(shape, max_packed_seqs=seqs)
            for shape in self.shapes.values()
            for seqs in self.seq_counts
        )

    def shape_of(self, lengths: Sequence[int], tokens: int) -> PackedShape:
        """The bucket's shape for these documents, as if it held them: with the fewest sequences."""
        return replace(self.shapes[tokens], max_packed_seqs=self._seqs_for(len(lengths)))

    def banks_of(self, packings: Sequence[Sequence[int]], buckets: Sequence[int]) -> list[BankKey]:
        """The bank of each microbatch, whose bucket was chosen; a larger one where none fits."""
        return [
            self._bank(tokens, self._seqs_for(len(lengths)))
            for lengths, tokens in zip(packings, buckets, strict=True)
        ]

    def largest_banks(self, buckets: Sequence[int]) -> list[BankKey]:
        """The banks with the most sequences, of microbatches whose documents are not known."""
        return [self._bank(tokens, self.seq_counts[0]) for tokens in buckets]

    def name(self, bank: Hashable) -> str:
        """For reports."""
        tokens, seqs = self._sizes(bank)
        return f"{tokens} tokens" + (f", {seqs} sequences" if self.has_fewer_sequences else "")

    def _seqs_for(self, num_documents: int) -> int:
        fewest = [seqs for seqs in self.seq_counts if num_documents < seqs]
        return fewest[-1] if fewest else self.seq_counts[0]

    def _bank(self, tokens: int, seqs: int) -> BankKey:
        return (tokens, seqs) if self.has_fewer_sequences else tokens

    def _sizes(self, bank: Hashable) -> tuple[int, int]:
        """Tokens and sequences."""
        if isinstance(bank, tuple):
            return bank
        assert isinstance(bank, int)
        return bank, self.seq_counts[0]

    def with_offsets_of(self, bank: Hashable, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A chunk's arguments with the sequences of ``bank``, where offsets are of the most.

        Others are left as they are, such as those of `packed_shapes`, or of a step that does not
        fit. Of the right ones nothing is lost: a microbatch of the bank has fewer documents, and
        its last sequence ends at the last row.
        """
        return with_cut_offsets(kwargs, *self._num_sequences.get(bank, (0, 0)))

    def choose(self, packings: Sequence[Sequence[int]], agree: Agree | None = None) -> list[int]:
        """The smallest bucket that each microbatch fits; the largest where none does.

        Args:
            packings: of each microbatch the tokens of each of its documents.
            agree: for ranks that share experts, whose microbatches go through a chunk together:
                element-wise maximum over them. They must have as many microbatches.
        """
        found = [
            (smallest_that_fits(lengths, self.shapes.values()) or self.shapes[self.keys[0]])
            for lengths in packings
        ]
        keys = [shape.max_packed_tokens for shape in found]
        return keys if agree is None else agree(keys)

    def derive(
        self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any], of: Hashable, wanted: Hashable
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A chunk's arguments as a microbatch of the bank ``wanted`` would have them.

        For captures of banks that no eager step has had. Rows are left out or filled with 0;
        documents that are too many become one with the last.

        Raises:
            ConfigError: an argument that is not known counts rows.
        """
        (has, _), (rows, seqs) = self._sizes(of), self._sizes(wanted)
        first, *others = args
        made = {name: self._of_name(c, name, value, has, rows) for name, value in kwargs.items()}
        shape = replace(self.shapes[rows], max_packed_seqs=seqs)
        if shape.max_document_tokens is None:
            for name in OFFSETS:
                offsets = made.get(f"{_PARAMS}{name}")
                if isinstance(offsets, torch.Tensor):
                    made[f"{_PARAMS}{name}"] = _with_sequences(offsets, seqs)
            _within_rows(made)
        else:  # no sequence may become longer than kernels are told
            made |= filled_offsets(made, shape)
        rest = [self._of_name(c, f"argument {i}", v, has, rows) for i, v in enumerate(others, 1)]
        return (resized(first, 0, has, rows), *rest), made

    def _of_name(self, c: int, name: str, value: Any, of: int, wanted: int) -> Any:
        if name in ROWS_AT:
            if name.startswith("rotary_"):
                longest, other = (self.shapes[size].longest_rows for size in (of, wanted))
                more = _rows_of(value) == longest + 1  # see `fixed_params`
                of, wanted = longest + more, other + more
            if isinstance(value, (tuple, list)):
                return type(value)(resized(v, ROWS_AT[name], of, wanted) for v in value)
            return resized(value, ROWS_AT[name], of, wanted)
        if name.startswith(_PARAMS):
            if isinstance(value, int) and not isinstance(value, bool):
                longest, other = (self.shapes[size].longest_rows for size in (of, wanted))
                if name in _LONGEST and value >= longest:
                    return value - longest + other
                return wanted if value == of else value
            if name == f"{_PARAMS}seq_idx":
                return resized(value, 1, of, wanted)
            if isinstance(value, torch.Tensor):  # offsets; those in rows end at the bucket's
                return torch.where(value == of, wanted, value).clamp(max=wanted).to(value.dtype)
        if of != wanted and isinstance(value, torch.Tensor) and of in value.shape:
            raise ConfigError(
                f"Chunk {c} takes {name} of shape {tuple(value.shape)}, and it is not known how it "
                f"looks in the bucket of {wanted} tokens, which no step before the capture had. "
                "Use no buckets with it, or warm up with microbatches of every bucket."
            )
        return value


def check_seq_counts(seq_counts: Sequence[int], most: int) -> None:
    """Refuse numbers of sequences that are not fewer than ``most``.

    Raises:
        ConfigError: one is not between 2 and that.
    """
    for count in seq_counts:
        if isinstance(count, bool) or not isinstance(count, int) or not 2 <= count < most:
            raise ConfigError(
                f"seq_buckets has {count!r}: fewer sequences that are captured too are whole "
                f"numbers from 2 and below max_packed_seqs ({most})."
            )


def with_cut_offsets(kwargs: dict[str, Any], most: int, wanted: int) -> dict[str, Any]:
    """A chunk's arguments with offsets of ``wanted`` sequences in the place of those of ``most``.

    Those of any other number are left as they are.
    """
    if most == wanted:
        return kwargs
    cut = {
        name: _with_sequences(offsets, wanted)
        for name in _OFFSET_ARGUMENTS
        if isinstance(offsets := kwargs.get(name), torch.Tensor) and offsets.numel() == most + 1
    }
    return {**kwargs, **cut} if cut else kwargs


def filled_offsets(kwargs: Mapping[str, Any], shape: PackedShape) -> dict[str, torch.Tensor]:
    """Offsets of a shape that documents fill as far as they can, in the place of given ones."""
    longest = shape.document_limit // shape.document_multiple * shape.document_multiple
    longest = longest or shape.document_limit
    count = shape.max_packed_tokens // shape.padded_length(longest)
    filled = pack([longest] * min(count, shape.max_documents), shape)
    made = {}
    for name in OFFSETS:
        given = kwargs.get(f"{_PARAMS}{name}")
        if isinstance(given, torch.Tensor):
            # Where nobody is told of padding there is none.
            padded = kwargs.get(f"{_PARAMS}{name}_padded")
            is_padded = "padded" in name or not isinstance(padded, torch.Tensor)
            values = filled.cu_seqlens_padded if is_padded else filled.cu_seqlens
            made[f"{_PARAMS}{name}"] = torch.from_numpy(values).to(given.device, given.dtype)
    return made


def _within_rows(kwargs: dict[str, Any]) -> None:
    """Cut tokens off documents whose rows were: offsets in rows say how many each may have."""
    for kind in ("q", "kv"):
        name = f"{_PARAMS}cu_seqlens_{kind}"
        real, padded = kwargs.get(name), kwargs.get(f"{name}_padded")
        if isinstance(real, torch.Tensor) and isinstance(padded, torch.Tensor):
            lengths = torch.minimum(real.diff(), padded.diff())
            ends = lengths.cumsum(0).to(real.dtype)
            kwargs[name] = torch.cat([torch.zeros_like(ends[:1]), ends])


def _with_sequences(offsets: torch.Tensor, num_seqs: int) -> torch.Tensor:
    """Offsets of so many sequences that end where they did."""
    more = num_seqs + 1 - offsets.numel()
    if more > 0:
        return torch.cat([offsets, offsets[-1:].expand(more)])
    return torch.cat([offsets[:num_seqs], offsets[-1:]]) if more < 0 else offsets


def _rows_of(value: Any) -> int | None:
    """Rows of a table, or of the first of several."""
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return first.size(0) if isinstance(first, torch.Tensor) else None


def resized(value: Any, dim: int, of: int, wanted: int) -> Any:
    """``value`` with rows of the bucket ``wanted``, which this rank may have only a part of."""
    if not isinstance(value, torch.Tensor):
        return value
    num_rows = value.size(dim) * wanted // of
    result = value.detach()
    if num_rows <= result.size(dim):
        result = result.narrow(dim, 0, num_rows).contiguous()
    else:
        more = list(result.shape)
        more[dim] = num_rows - result.size(dim)
        result = torch.cat([result, result.new_zeros(more)], dim)
    return result.requires_grad_(value.requires_grad)
