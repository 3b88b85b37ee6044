"""Derive a chunk's arguments in one bank from those in another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.features.packing import params as packed
from chunkgraph.megatron.features.packing.bank import PackedBank
from chunkgraph.megatron.features.packing.params import OFFSETS
from chunkgraph.packing import PackedShape, pack

__all__ = ["derived_call", "with_cut_offsets"]

_ROWS_AT = {
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
_PARAMS = f"{packed.ARGUMENT}."
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
    if name in _ROWS_AT:
        rows, other_rows = of.num_tokens, wanted.num_tokens
        if name.startswith("rotary_"):
            more = _rows_of(value) == whole + 1  # see `fixed_params`
            rows, other_rows = whole + more, other_whole + more
        if isinstance(value, (tuple, list)):
            return type(value)(_resized(v, _ROWS_AT[name], rows, other_rows) for v in value)
        return _resized(value, _ROWS_AT[name], rows, other_rows)
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
