"""Split Megatron's ``PackedSeqParams`` at the boundary of a chunk, and reassemble it inside.

A captured chunk takes tensors and plain values. So the call splits the parameters, and the captured
forward reassembles them: offsets become static inputs of the slot, so that each microbatch in
flight has its own, and constants (``max_seqlen_q``, ``qkv_format``, ...) are compared with the
captured values like any other argument.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.packing import PackedSequences, PackedShape

ARGUMENT = "packed_seq_params"
"""The argument of Megatron's models and blocks."""

PADDING_MASK = "padding_mask"
"""An argument for models with experts: bool [1, rows], True for rows without a token."""

_ROWS_AT_ONCE = 64
"""Rows that causal-conv1d's forward reads together, past the last row too, up to 1.6.1."""
_PREFIX = f"{ARGUMENT}."
_CLASS = f"{_PREFIX}class"
_SAME = "the same tensor as "
_SEQ_IDX = "seq_idx"
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
"""Fields with the begins and ends of documents."""


def refuse_other_context(shape: PackedShape, config: Any) -> None:
    """Refuse a shape whose context-parallel size differs from the model's.

    Args:
        shape: Shape of the packed sequences.
        config: Megatron's TransformerConfig.

    Raises:
        ConfigError: The sizes differ.
    """
    size = getattr(config, "context_parallel_size", 1) or 1
    if shape.context_parallel_size != size:
        raise ConfigError(
            f"The packed shape is for context_parallel_size {shape.context_parallel_size}, but the "
            f"model has {size}, and documents are padded to a multiple of twice the size: pass "
            f"packing=PackedShape(..., context_parallel_size={size}) to attach()."
        )


def shares_keys(config: Any) -> bool:
    """Return whether several attention heads share one head of keys and values.

    Args:
        config: Megatron's TransformerConfig, or its arguments.
    """
    groups = getattr(config, "num_query_groups", None)
    return (
        groups is not None
        and groups < config.num_attention_heads
        # Only in arguments: the number has an effect only with this flag.
        and getattr(config, "group_query_attention", True)
        and not getattr(config, "multi_latent_attention", False)
    )


def split_params(params: Any) -> dict[str, Any]:
    """Split the parameters into tensors and constants, as separate keyword arguments.

    A tensor in several fields becomes one argument: kernels distinguish one object from two equal
    ones.

    Args:
        params: A ``PackedSeqParams`` of any release.
    """
    names = dict.fromkeys([field.name for field in dataclasses.fields(params)])
    names.update(dict.fromkeys(getattr(params, "__dict__", ())))
    parts: dict[str, Any] = {_CLASS: type(params)}
    seen: dict[int, str] = {}
    for name in names:
        value = getattr(params, name)
        if isinstance(value, torch.Tensor):
            if id(value) in seen:
                value = f"{_SAME}{seen[id(value)]}"
            else:
                seen[id(value)] = name
        parts[f"{_PREFIX}{name}"] = value
    return parts


def is_packed(kwargs: Mapping[str, Any]) -> bool:
    """Return whether these arguments contain parts from `split_params`."""
    return _CLASS in kwargs


def join_params(kwargs: dict[str, Any]) -> None:
    """Replace the parts from `split_params`, if any, by ``packed_seq_params``.

    The constructor is not called: in later releases it computes indices with a host read. The
    tensors are new objects in every call, so values that are cached on one of them (see
    `packed_rope`) belong to that call only. They share memory with the parts, except for
    ``seq_idx``, which gets extra memory after its last row if necessary (`num_extra_rows`).
    """
    kind = kwargs.pop(_CLASS, None)
    if kind is None:
        return
    params = kind.__new__(kind)
    fields = {n.removeprefix(_PREFIX): kwargs.pop(n) for n in list(kwargs) if n.startswith(_PREFIX)}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            fields[name] = value.detach()
            if name == _SEQ_IDX:
                fields[name] = with_extra_rows(fields[name])
    for name, value in fields.items():
        is_same = isinstance(value, str) and value.startswith(_SAME)
        object.__setattr__(params, name, fields[value.removeprefix(_SAME)] if is_same else value)
    kwargs[ARGUMENT] = params


def refuse_rows_after_offsets(
    kwargs: Mapping[str, Any], num_rows: int, context_parallel_size: int, label: str
) -> None:
    """Refuse offsets that end before the last row; read the device.

    Kernels of packed sequences write the rows up to the last offset. In a replay, the other rows
    still contain another microbatch's values.

    Args:
        kwargs: Arguments of a call, with the parts from `split_params`.
        num_rows: Rows of this rank's input.
        context_parallel_size: Number of ranks that share the rows, if the parameters do not set it.
        label: Name of the chunk, for errors.

    Raises:
        ConfigError: Offsets end before the last row.
    """
    group = kwargs.get(f"{_PREFIX}cp_group")
    size = kwargs.get(f"{_PREFIX}local_cp_size")
    if size is None:
        size = context_parallel_size if group is None else group.size()
    for plain, padded in zip(OFFSETS[:2], OFFSETS[2:], strict=True):
        name = padded if kwargs.get(f"{_PREFIX}{padded}") is not None else plain
        offsets = kwargs.get(f"{_PREFIX}{name}")
        if isinstance(offsets, str) and offsets.startswith(_SAME):
            offsets = kwargs[f"{_PREFIX}{offsets.removeprefix(_SAME)}"]
        if not isinstance(offsets, torch.Tensor):
            continue
        end = int(offsets[-1])
        if end != num_rows * size:
            raise ConfigError(
                f"{label}: {ARGUMENT}.{name} ends at {end}, but there are {num_rows * size} rows "
                f"({num_rows} on each of {size} context-parallel ranks). Rows after the end "
                "would contain values of an earlier microbatch. Pack with "
                "chunkgraph.packing.pack(), whose last sequence has no token and reaches the "
                "last row, or pass such offsets."
            )


def make_params(
    packed: PackedSequences, device: torch.device, *, with_seq_idx: bool = False
) -> Any:
    """Return Megatron's ``PackedSeqParams`` of one packed microbatch.

    This makes one asynchronous copy to the device, from pinned memory, and reads nothing back.

    Args:
        packed: The microbatch, computed on the host.
        device: Device of the offsets.
        with_seq_idx: Also set the document of each row, for state-space layers, in releases whose
            parameters have this field.
    """
    module = import_megatron("megatron.core.packed_seq_params")
    kind = module.PackedSeqParams
    names = {field.name for field in dataclasses.fields(kind)}
    rows = [packed.cu_seqlens, packed.cu_seqlens_padded]
    sizes = [len(row) for row in rows]
    if with_seq_idx and _SEQ_IDX in names:
        num_extra = num_extra_rows(len(packed.seq_idx))
        rows += [packed.seq_idx, np.zeros(num_extra, dtype=np.int32)]
        sizes += [len(packed.seq_idx), num_extra]
    offsets, padded, *others = to_device(np.concatenate(rows), device).split(sizes)
    params = kind(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
    )
    if "pad_between_seqs" in names:
        params.pad_between_seqs = True
    if others:
        params.seq_idx = others[0].unsqueeze(0)
    return params


def fixed_params(params: Any, packed: PackedSequences) -> Any:
    """Return a copy of ``params`` with the offsets of a fixed shape.

    Nothing is read from the device. ``max_seqlen`` is one token longer than the shape: Megatron's
    unfused RoPE mistakes a table as long as all documents together for a table that does not
    restart with each document.

    Args:
        params: A script's ``PackedSeqParams`` of these documents, which fill all rows.
        packed: The same microbatch in its shape.
    """
    fixed = copy.copy(params)  # the constructor may read from the device
    by_object: dict[int, torch.Tensor] = {}
    for name in OFFSETS:
        offsets = getattr(params, name)
        if offsets is None:
            continue
        if id(offsets) not in by_object:
            by_object[id(offsets)] = to_device(packed.cu_seqlens, offsets.device)
        setattr(fixed, name, by_object[id(offsets)])
    fixed.max_seqlen_q = fixed.max_seqlen_kv = packed.max_seqlen + 1
    rows = packed.shape.max_packed_tokens
    for name in ("tokens_per_sample", "total_tokens"):  # of a row that may have been cut
        number = getattr(params, name, None)
        if number is not None:
            setattr(fixed, name, min(number, rows))
    seq_idx = getattr(params, "seq_idx", None)
    if seq_idx is not None:
        if seq_idx.numel() != rows:
            raise ConfigError(
                f"{ARGUMENT}.seq_idx has {seq_idx.numel()} rows, but a Mamba layer sees {rows}: "
                "those of all context-parallel ranks. Set PackedSeqParams.total_tokens to that "
                "number."
            )
        documents = to_device(packed.seq_idx, seq_idx.device)
        fixed.seq_idx = documents.to(seq_idx.dtype).view(seq_idx.shape)
    return fixed


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy values to the device asynchronously."""
    host = torch.from_numpy(values)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def num_extra_rows(num_rows: int) -> int:
    """Return the rows after the last one that a kernel may read (causal-conv1d's issue 67).

    The kernel does not use the values, but the memory must exist.
    """
    return -num_rows % _ROWS_AT_ONCE


def with_extra_rows(seq_idx: torch.Tensor) -> torch.Tensor:
    """Return the same values [..., rows] with memory after them; see `num_extra_rows`."""
    rows = seq_idx.size(-1)
    num_extra = num_extra_rows(rows)
    return functional.pad(seq_idx, (0, num_extra))[..., :rows] if num_extra else seq_idx
