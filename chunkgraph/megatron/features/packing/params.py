"""Packed sequences at the boundary of a chunk: Megatron's ``PackedSeqParams``, in pieces.

A captured chunk takes tensors and plain values. So the parameters are taken apart at the call and
put together again inside the captured forward: offsets become static inputs of the slot, so that
each microbatch in flight has its own, and what is constant (``max_seqlen_q``, ``qkv_format``, ...)
is compared with the captured value like any other argument.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn import functional

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.packing import PackedSequences, PackedShape

__all__ = [
    "ARGUMENT",
    "OFFSETS",
    "PADDING_MASK",
    "fixed_params",
    "is_packed",
    "make_params",
    "put_together",
    "refuse_other_context",
    "refuse_other_length",
    "refuse_predictions_over_padding",
    "refuse_rows_behind_offsets",
    "room_behind",
    "sent",
    "take_apart",
    "with_room",
]

ARGUMENT = "packed_seq_params"
"""The argument of Megatron's models and blocks."""

PADDING_MASK = "padding_mask"
"""Another, which models with experts need: bool [1, rows], True where a row holds no token."""

_ROWS_AT_ONCE = 64
"""Of which causal-conv1d's forward reads the documents; behind the last row too, up to 1.6.1."""
_PREFIX = f"{ARGUMENT}."
_CLASS = f"{_PREFIX}class"
_SAME = "the same tensor as "
_SEQ_IDX = "seq_idx"
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
"""Fields that say where documents begin and end."""
_MUST_BE_CONSTANT = ("max_seqlen_q", "max_seqlen_kv", "total_tokens", "local_cp_size")


def refuse_other_context(shape: PackedShape, config: Any) -> None:
    """Refuse a shape that is for another context-parallel size than the model.

    Args:
        shape: of the packed sequences.
        config: Megatron's TransformerConfig.

    Raises:
        ConfigError: the sizes differ.
    """
    size = getattr(config, "context_parallel_size", 1) or 1
    if shape.context_parallel_size != size:
        raise ConfigError(
            f"The packed shape is for context_parallel_size {shape.context_parallel_size}, and the "
            f"model has {size}. Its documents are padded to a multiple of twice that size: give "
            f"attach() packing=PackedShape(..., context_parallel_size={size})."
        )


def refuse_other_length(schedule: Mapping[str, Any]) -> None:
    """Refuse a length of the decoder that is not what stages send each other.

    Raises:
        ConfigError: it is another.
    """
    length, decoder = schedule.get("seq_length"), schedule.get("decoder_seq_length")
    if decoder is None or decoder == length:
        return
    raise ConfigError(
        f"The schedule was given decoder_seq_length {decoder}, by which Megatron's pipeline "
        f"stages receive, and packed microbatches have {length} rows. Leave it out (a script's "
        "--decoder-seq-length): it is for models with an encoder."
    )


def refuse_predictions_over_padding(shape: PackedShape, config: Any) -> None:
    """Refuse multi-token prediction where padding between documents is not counted as theirs.

    Megatron rolls labels within documents by the offsets of tokens, which are those of rows only
    where nothing lies between documents; eager training has the same wrong labels.

    Args:
        shape: of the packed sequences.
        config: Megatron's TransformerConfig.

    Raises:
        ConfigError: the model would learn from labels of other documents.
    """
    predicts = getattr(config, "mtp_num_layers", None)
    if predicts and shape.context_parallel_size > 1 and not shape.counts_padding:
        raise ConfigError(
            f"mtp_num_layers={predicts} with packed documents that {shape.context_parallel_size} "
            "context-parallel ranks share: Megatron then takes labels of several documents for "
            "one's, as padding lies between them. Give attach() PackedShape(..., "
            "counts_padding=True) and pack into that shape, or leave multi-token prediction out."
        )


def take_apart(params: Any, label: str) -> dict[str, Any]:
    """Tensors and constants of the parameters, as keyword arguments of their own.

    A tensor that stands in several fields is given once: kernels treat one object otherwise than
    two that are equal.

    Args:
        params: a ``PackedSeqParams`` of any release.
        label: names the chunk in errors.

    Raises:
        ConfigError: it holds something that a graph cannot.
    """
    if not dataclasses.is_dataclass(params):
        raise ConfigError(
            f"{label} was called with {ARGUMENT} of type {type(params).__name__}. Give Megatron's "
            "PackedSeqParams."
        )
    names = dict.fromkeys([field.name for field in dataclasses.fields(params)])
    names.update(dict.fromkeys(getattr(params, "__dict__", ())))
    parts: dict[str, Any] = {_CLASS: type(params)}
    seen: dict[int, str] = {}
    for name in names:
        value = getattr(params, name)
        if isinstance(value, torch.Tensor):
            if name in _MUST_BE_CONSTANT:
                raise ConfigError(
                    f"{label}: {ARGUMENT}.{name} is a tensor, which Megatron reads on the host. "
                    "Give a Python int, the same for every microbatch: the most that any packing "
                    "may need."
                )
            if id(value) in seen:
                value = f"{_SAME}{seen[id(value)]}"
            else:
                seen[id(value)] = name
        parts[f"{_PREFIX}{name}"] = value
    return parts


def is_packed(given: Mapping[str, Any]) -> bool:
    """Whether `take_apart` added to these arguments."""
    return _CLASS in given


def put_together(given: dict[str, Any]) -> None:
    """Put what `take_apart` made back in the place of ``packed_seq_params``, where there is any.

    Without calling its constructor, which in later releases computes indices with a read on the
    host. Its tensors are new objects for every call, so that what is remembered with one of them
    (see `packed_rope`) is that call's alone; on the same memory, but for ``seq_idx``, which
    gets room behind its last row where it needs it (`room_behind`).
    """
    kind = given.pop(_CLASS, None)
    if kind is None:
        return
    params = kind.__new__(kind)
    fields = {n.removeprefix(_PREFIX): given.pop(n) for n in list(given) if n.startswith(_PREFIX)}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            fields[name] = value.detach()
            if name == _SEQ_IDX:
                fields[name] = with_room(fields[name])
    for name, value in fields.items():
        is_same = isinstance(value, str) and value.startswith(_SAME)
        own = fields[value.removeprefix(_SAME)] if is_same else value
        object.__setattr__(params, name, own)
    given[ARGUMENT] = params


def refuse_rows_behind_offsets(
    given: Mapping[str, Any], num_rows: int, context_parallel_size: int, label: str
) -> None:
    """Refuse offsets that end before the last row does; reads the device.

    Kernels of packed sequences write the rows up to the last offset. What they leave as it was is
    another microbatch's in a replay.

    Args:
        given: arguments of a call, with what `take_apart` made of the parameters.
        num_rows: of this rank's input.
        context_parallel_size: ranks that share the rows, where the parameters do not say.
        label: names the chunk in errors.

    Raises:
        ConfigError: they do.
    """
    group = given.get(f"{_PREFIX}cp_group")
    size = given.get(f"{_PREFIX}local_cp_size")
    if size is None:
        size = context_parallel_size if group is None else group.size()
    for plain, padded in zip(OFFSETS[:2], OFFSETS[2:], strict=True):
        name = padded if given.get(f"{_PREFIX}{padded}") is not None else plain
        offsets = given.get(f"{_PREFIX}{name}")
        if isinstance(offsets, str) and offsets.startswith(_SAME):
            offsets = given[f"{_PREFIX}{offsets.removeprefix(_SAME)}"]
        if not isinstance(offsets, torch.Tensor):
            continue
        end = int(offsets[-1])
        if end != num_rows * size:
            raise ConfigError(
                f"{label}: {ARGUMENT}.{name} ends at {end}, and there are {num_rows * size} rows "
                f"({num_rows} on each of {size} context-parallel ranks). Rows behind it would hold "
                "what an earlier microbatch left there. Pack with chunkgraph.packing.pack(), whose "
                "last sequence has no token and reaches the last row, or give offsets that do."
            )


def make_params(
    packed: PackedSequences, device: torch.device, *, with_seq_idx: bool = False
) -> Any:
    """Megatron's ``PackedSeqParams`` of one packed microbatch.

    One asynchronous copy to the device, from pinned memory, and no read from there.

    Args:
        packed: the microbatch, computed on the host.
        device: where the offsets go.
        with_seq_idx: also give state-space layers the document of each row, in releases whose
            parameters have it.
    """
    module = import_megatron("megatron.core.packed_seq_params")
    kind = module.PackedSeqParams
    known = {field.name for field in dataclasses.fields(kind)}
    rows = [torch.from_numpy(packed.cu_seqlens), torch.from_numpy(packed.cu_seqlens_padded)]
    sizes = [len(row) for row in rows]
    if with_seq_idx and _SEQ_IDX in known:
        rows.append(torch.from_numpy(packed.seq_idx))
        room = room_behind(len(packed.seq_idx))
        rows.append(torch.zeros(room, dtype=torch.int32))
        sizes += [len(packed.seq_idx), room]
    offsets, padded, *others = _to_device(torch.cat(rows), device).split(sizes)
    params = kind(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
    )
    if "pad_between_seqs" in known:
        params.pad_between_seqs = True
    if others:
        params.seq_idx = others[0].unsqueeze(0)
    return params


def fixed_params(params: Any, packed: PackedSequences) -> Any:
    """``params`` of a microbatch as they would be with the offsets of a fixed shape.

    Nothing is read from the device. The longest document is said to be one token longer than the
    shape: Megatron's unfused RoPE takes a table as long as all documents together for one that
    does not begin anew with each of them.

    Args:
        params: Megatron's ``PackedSeqParams``, as a script made them of these documents, which
            fill all rows.
        packed: the same microbatch in its shape.
    """
    made = copy.copy(params)  # its constructor may read from the device
    by_object: dict[int, torch.Tensor] = {}
    for name in OFFSETS:
        own = getattr(params, name)
        if own is None:
            continue
        if id(own) not in by_object:
            by_object[id(own)] = _to_device(torch.from_numpy(packed.cu_seqlens), own.device)
        setattr(made, name, by_object[id(own)])
    made.max_seqlen_q = made.max_seqlen_kv = packed.max_seqlen + 1
    rows = packed.shape.max_packed_tokens
    for name in ("tokens_per_sample", "total_tokens"):  # of a row that may have been cut
        number = getattr(params, name, None)
        if number is not None:
            setattr(made, name, min(number, rows))
    seq_idx = getattr(params, "seq_idx", None)
    if seq_idx is not None:
        if seq_idx.numel() != rows:
            raise ConfigError(
                f"{ARGUMENT}.seq_idx has {seq_idx.numel()} rows, and a Mamba layer sees {rows}: "
                "those of all context-parallel ranks. Give PackedSeqParams their number as "
                "total_tokens."
            )
        own = _to_device(torch.from_numpy(packed.seq_idx), seq_idx.device)
        made.seq_idx = own.to(seq_idx.dtype).view(seq_idx.shape)
    return made


def sent(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The values on the device, for which the host does not wait."""
    return _to_device(torch.from_numpy(values), device)


def _to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def room_behind(num_rows: int) -> int:
    """Rows behind the last one whose document may be read too (causal-conv1d's issue 67).

    Nothing comes of what is read there, but it has to be memory.
    """
    return -num_rows % _ROWS_AT_ONCE


def with_room(seq_idx: torch.Tensor) -> torch.Tensor:
    """The same documents of rows, [..., rows], with memory behind them; see `room_behind`."""
    rows = seq_idx.size(-1)
    room = room_behind(rows)
    return functional.pad(seq_idx, (0, room))[..., :rows] if room else seq_idx
