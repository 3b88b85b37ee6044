"""The options of packed sequences, the keys of their banks, and a chunk's arguments in a bank."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.features.packing.params import ARGUMENT, OFFSETS
from chunkgraph.packing import PackedShape, pack


@dataclass(frozen=True, eq=False, repr=False)
class PackedBank:
    """A bank key: the context-parallel size, rows and sequences of a microbatch.

    A graph contains the communicator of its capture. So two keys are equal only if they have the
    same process group object; another group of the same ranks differs.

    Attributes:
        shape: Shape into which microbatches are packed.
        group: Process group that shares a microbatch, if sizes change; None for this rank alone or
            the model's group.
        name: Name for reports.
    """

    shape: PackedShape
    group: Any = None
    name: str = ""
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, id(self.group))))

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self.shape.context_parallel_size

    @property
    def num_tokens(self) -> int:
        """Return the rows of a microbatch on one rank."""
        return self.shape.tokens_per_rank

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedBank):
            return NotImplemented
        is_alike = self._hash == other._hash and self.shape == other.shape
        return is_alike and self.group is other.group

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self.name or str(self.shape)


class ScheduledBanks(list[PackedBank]):
    """The banks of one rank's microbatches, with a digest that identifies their schedule.

    Args:
        banks: Banks in the order of the microbatches.
        digest: Digest of the schedule, the same on all ranks.
    """

    def __init__(self, banks: Iterable[PackedBank], digest: int) -> None:
        super().__init__(banks)
        self.digest = digest


def digest_of_plan(banks: Sequence[object] | None) -> int:
    """Return the digest of the banks' schedule; 0 without a schedule."""
    return banks.digest if isinstance(banks, ScheduledBanks) else 0


@dataclass(frozen=True)
class PackingOptions:
    """Packed sequences of fixed shapes, the same on every rank.

    Attributes:
        shape: The fixed shape of every microbatch.
        buckets: Shorter lengths that are captured too, as fractions of ``shape``'s length or in
            tokens. A microbatch must then have the rows of the smallest length that holds it
            (`MegatronChunkGraphs.buckets`), in eager steps too.
        seq_buckets: Smaller numbers of sequences that are captured too, for every length. A
            microbatch replays the graphs with the fewest sequences that hold its documents. Its
            offsets may have that number (`MegatronChunkGraphs.packed_shapes`), or the largest; the
            latter are cut, in eager training steps too. None for `default_seq_buckets`.
        fills_rows: Whether documents fill all rows of every microbatch, as in Megatron's data
            sets. Experts then take every row, as without chunk graphs, and a step that fits but
            has free rows is an error; a step that does not fit runs eagerly with any rows.
            Otherwise rows after the documents are kept from experts
            (`keep_padding_from_experts`), and the model takes ``padding_mask``.
    """

    shape: PackedShape
    buckets: Sequence[float] = ()
    seq_buckets: Sequence[int] | None = None
    fills_rows: bool = False


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
"""Dimension of rows in arguments of Megatron's models."""
_PARAMS = f"{ARGUMENT}."
_OFFSET_ARGUMENTS = tuple(f"{_PARAMS}{name}" for name in OFFSETS)
_LONGEST = (f"{_PARAMS}max_seqlen_q", f"{_PARAMS}max_seqlen_kv")
_GROUPS = ("cp_group", f"{_PARAMS}cp_group")
_SIZES = ("cp_size", f"{_PARAMS}local_cp_size")


def derived_call(
    c: int, args: tuple[Any, ...], kwargs: dict[str, Any], of: Hashable, wanted: Hashable
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Derive the arguments of chunk ``c`` in the bank ``wanted`` from those in the bank ``of``.

    This serves captures of banks that no eager step has used. The group and the numbers of rows and
    ranks are replaced. Rows are removed or filled with 0; excess documents are merged into the last
    one. If ranks could not share these documents, or one might exceed the kernels' maximum length,
    new documents fill the rows: passes before a capture really run with them.

    Raises:
        ConfigError: An unknown argument depends on the number of rows.
    """
    assert isinstance(of, PackedBank)
    assert isinstance(wanted, PackedBank)
    first, *others = args
    derived = {name: _derived(c, name, value, of, wanted) for name, value in kwargs.items()}
    shape = wanted.shape
    if of.size == wanted.size:
        for name in _OFFSET_ARGUMENTS:
            if isinstance(offsets := derived.get(name), torch.Tensor):
                derived[name] = _with_sequences(offsets, shape.max_packed_seqs)
        _cut_to_rows(derived)
    elif of.shape != shape:
        derived |= _filled_offsets(derived, shape)
    rest = [_derived(c, f"argument {i}", v, of, wanted) for i, v in enumerate(others, 1)]
    return (_resized(first, 0, of.num_tokens, wanted.num_tokens), *rest), derived


def with_cut_offsets(kwargs: dict[str, Any], most: int, wanted: int) -> dict[str, Any]:
    """Return a chunk's arguments with offsets of ``wanted`` sequences instead of ``most``.

    Offsets of any other number are unchanged.
    """
    if most == wanted:
        return kwargs
    cut = {
        name: _with_sequences(offsets, wanted)
        for name in _OFFSET_ARGUMENTS
        if isinstance(offsets := kwargs.get(name), torch.Tensor) and offsets.numel() == most + 1
    }
    return {**kwargs, **cut} if cut else kwargs


def _derived(c: int, name: str, value: Any, of: PackedBank, wanted: PackedBank) -> Any:
    if of.group is not wanted.group and (name in _GROUPS or (value is of.group is not None)):
        return wanted.group
    if name in _SIZES:
        return wanted.size if value == of.size else value
    whole, other_whole = of.shape.max_packed_tokens, wanted.shape.max_packed_tokens
    if name in ROWS_AT:
        rows, other_rows = of.num_tokens, wanted.num_tokens
        if name.startswith("rotary_"):
            more = _rows_of(value) == whole + 1  # see `fixed_params`
            rows, other_rows = whole + more, other_whole + more
        if isinstance(value, (tuple, list)):
            return type(value)(_resized(v, ROWS_AT[name], rows, other_rows) for v in value)
        return _resized(value, ROWS_AT[name], rows, other_rows)
    if name.startswith(_PARAMS):
        if isinstance(value, int) and not isinstance(value, bool):
            if name in _LONGEST and value >= whole:
                return value - whole + other_whole
            return other_whole if value == whole else value
        if name == f"{_PARAMS}seq_idx":
            return _resized(value, 1, whole, other_whole)
        if isinstance(value, torch.Tensor):  # offsets; those in rows end at the bank's
            ends = torch.where(value == whole, other_whole, value)
            return ends.clamp(max=other_whole).to(value.dtype)
    changed = {
        size
        for size, other in ((whole, other_whole), (of.num_tokens, wanted.num_tokens))
        if size != other
    }
    if isinstance(value, torch.Tensor) and changed & set(value.shape):
        raise ConfigError(
            f"Chunk {c} takes {name} of shape {tuple(value.shape)}. Its shape in the bank of "
            f"{wanted} is unknown, since no step before the capture used this bank. Use no "
            "buckets with it, or warm up with microbatches of every bank."
        )
    return value


def _filled_offsets(kwargs: Mapping[str, Any], shape: PackedShape) -> dict[str, torch.Tensor]:
    """Return new offsets for a shape that documents fill as far as possible."""
    filled = pack([shape.max_packed_tokens], shape)
    by_name = {}
    for name in _OFFSET_ARGUMENTS:
        offsets = kwargs.get(name)
        if isinstance(offsets, torch.Tensor):
            # Without padded offsets, the plain ones include padding.
            is_padded = "padded" in name or not isinstance(
                kwargs.get(f"{name}_padded"), torch.Tensor
            )
            values = filled.cu_seqlens_padded if is_padded else filled.cu_seqlens
            by_name[name] = torch.from_numpy(values).to(offsets.device, offsets.dtype)
    return by_name


def _cut_to_rows(kwargs: dict[str, Any]) -> None:
    """Cut documents to their rows: padded offsets limit the tokens of each document."""
    for kind in ("q", "kv"):
        name = f"{_PARAMS}cu_seqlens_{kind}"
        real, padded = kwargs.get(name), kwargs.get(f"{name}_padded")
        if isinstance(real, torch.Tensor) and isinstance(padded, torch.Tensor):
            lengths = torch.minimum(real.diff(), padded.diff())
            ends = lengths.cumsum(0).to(real.dtype)
            kwargs[name] = torch.cat([torch.zeros_like(ends[:1]), ends])


def _with_sequences(offsets: torch.Tensor, num_seqs: int) -> torch.Tensor:
    """Return offsets of ``num_seqs`` sequences with the same end."""
    more = num_seqs + 1 - offsets.numel()
    if more > 0:
        return torch.cat([offsets, offsets[-1:].expand(more)])
    return torch.cat([offsets[:num_seqs], offsets[-1:]]) if more < 0 else offsets


def _rows_of(value: Any) -> int | None:
    """Return the rows of a table, or of the first of several."""
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return first.size(0) if isinstance(first, torch.Tensor) else None


def _resized(value: Any, dim: int, rows: int, wanted: int) -> Any:
    """Return ``value`` resized from ``rows`` to ``wanted`` rows, or by the same ratio."""
    if not isinstance(value, torch.Tensor):
        return value
    num_rows = value.size(dim) * wanted // rows
    result = value.detach()
    if num_rows <= result.size(dim):
        result = result.narrow(dim, 0, num_rows).contiguous()
    else:
        more = list(result.shape)
        more[dim] = num_rows - result.size(dim)
        result = torch.cat([result, result.new_zeros(more)], dim)
    return result.requires_grad_(value.requires_grad)
