"""Read the tensors that a forward keeps for its backward from the autograd graph, by layer.

They are the only values between a chunk's input and output that a replay leaves in memory. They are
recorded by address, because references would change the memory under verification. Tensors that a
custom function keeps in its own attributes are not seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.engine.autograd_graph import nodes_below
from chunkgraph.engine.bits import has_nan, same_bits
from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.graphs import AddressRanges, tensor_at

__all__ = ["Place", "SavedTensor", "first_difference", "first_nan", "saved_tensors"]

_NO_NUMBER = 1 << 62


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that an operator kept for its backward.

    Attributes:
        layer: the layer whose forward ran the operator; "" if unknown.
        operator: the autograd node, and the name under which it keeps the tensor.
        address: address of the first element; the memory may be freed.
        tensor: the tensor, or None if only its address is recorded.
    """

    layer: str
    operator: str
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor | None = None

    def without_tensor(self) -> SavedTensor:
        """Return the record without a reference to the tensor."""
        return SavedTensor(
            self.layer,
            self.operator,
            self.address,
            self.shape,
            self.stride,
            self.dtype,
            self.device,
        )

    def lies_in(self, memory: AddressRanges) -> bool:
        """Return whether the whole tensor lies in ``memory``."""
        start, end = self._span()
        return start < end and (AddressRanges([(start, end)]) & memory).num_bytes == end - start

    def read(self) -> torch.Tensor:
        """Return a tensor on the present contents; the caller ensures that the memory exists."""
        start, end = self._span()
        data = tensor_at(start, end - start, self.device).view(self.dtype)
        return data.as_strided(self.shape, self.stride, 0)

    def _span(self) -> tuple[int, int]:
        if 0 in self.shape:
            return self.address, self.address
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.address, self.address + (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """The first saved tensor that is wrong.

    Attributes:
        first: this tensor.
        before: the layer of the last correct tensor before it, or "".
        instead: text about what an eager pass keeps instead, if it is another tensor.
    """

    first: SavedTensor
    before: str
    instead: str = ""

    def __str__(self) -> str:
        kept = f"{self.first.operator}, shape {self.first.shape}{self.instead}"
        layer = self.first.layer or "(outside of any layer)"
        if self.before and self.before != self.first.layer:
            return (
                f"{layer} (it keeps {kept}; the last correct tensor is kept by {self.before}: the "
                "cause is between the two)"
            )
        return f"{layer} (it keeps {kept})"


def saved_tensors(outputs: Sequence[Any], watch: LayerWatch) -> list[SavedTensor]:
    """Return the tensors that a forward keeps, in the order of its operators.

    Args:
        outputs: results of the forward; the autograd graph must be alive.
        watch: the watch that followed the forward.
    """
    # Hide these operators from recorders that are active.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return _walk(outputs, watch)


def _walk(outputs: Sequence[Any], watch: LayerWatch) -> list[SavedTensor]:
    entries: list[tuple[int, str, SavedTensor]] = []
    for node in nodes_below(t for t in outputs if isinstance(t, torch.Tensor)):
        number = node._sequence_nr()
        for name, tensor in _kept_by(node):
            kind = f"{node.name()}.{name}"
            entries.append((number, kind, _record(tensor, watch.layer_of(number), kind)))
    entries = [entry for entry in entries if entry[0] < _NO_NUMBER]
    return [saved for _, _, saved in sorted(entries, key=lambda entry: entry[:2])]


def first_difference(
    replayed: Sequence[SavedTensor], eager: Sequence[SavedTensor], memory: AddressRanges
) -> Place | None:
    """Return the first saved tensor in ``memory`` that differs from the eager pass's, or None.

    A tensor differs in its present value, or if the eager pass keeps another kind of tensor.
    """
    before = ""
    for i, record in enumerate(replayed):
        if i >= len(eager) or _kind(record) != _kind(eager[i]):
            other = f"{eager[i].operator}, shape {eager[i].shape}" if i < len(eager) else "nothing"
            return Place(record, before, f", where the eager pass keeps {other}")
        expected = eager[i].tensor
        if expected is None or not record.lies_in(memory):
            continue
        if expected.device != record.device:
            continue  # attention keeps its seed on the device in a capture, else on the host
        if not same_bits(record.read(), expected):
            return Place(record, before)
        before = record.layer
    return None


def first_nan(replayed: Sequence[SavedTensor], memory: AddressRanges) -> Place | None:
    """Return the first saved tensor in ``memory`` that holds a NaN now, or None."""
    before = ""
    for record in replayed:
        if not record.lies_in(memory):
            continue
        if has_nan([record.read()]):
            return Place(record, before)
        before = record.layer
    return None


def _record(tensor: torch.Tensor, layer: str, operator: str) -> SavedTensor:
    return SavedTensor(
        layer=layer,
        operator=operator,
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=tensor.dtype,
        device=tensor.device,
        tensor=tensor.detach(),
    )


def _kind(saved: SavedTensor) -> tuple[Any, ...]:
    return saved.operator, saved.shape, saved.dtype


def _kept_by(node: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of the tensors that a node keeps for its backward.

    Tensors that a custom function keeps in its own attributes are not seen.
    """
    kept: list[tuple[str, torch.Tensor]] = []
    kind: type = type(node)
    for name in _names_of_saved(kind):
        # Tensors that were written later, and freed graphs, cannot be read.
        with contextlib.suppress(RuntimeError):
            if not _is_plain(getattr(node, f"_raw{name}")):
                continue
            value = getattr(node, "saved_tensors" if name == "_saved_tensors" else name)
            values = value if isinstance(value, (tuple, list)) else (value,)
            kept.extend(
                (name.removeprefix("_saved_"), v) for v in values if isinstance(v, torch.Tensor)
            )
    # Skip wrappers without their own memory (quantized tensors); the node keeps their parts too.
    return [
        (name, t)
        for name, t in kept
        if type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided and _has_memory(t)
    ]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has elements whose memory is there; recomputation frees it."""
    return bool(tensor.numel() and tensor.untyped_storage().nbytes())


def _is_plain(raw: Any) -> bool:
    """Return whether reading a saved value calls no hook, which might recompute a forward."""
    values = raw if isinstance(raw, (tuple, list)) else (raw,)
    return all(getattr(saved, "unpack_hook", _is_plain) is None for saved in values)


@functools.cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    raw = [n.removeprefix("_raw") for n in dir(kind) if n.startswith("_raw_saved_")]
    known = dir(kind)
    return tuple(n for n in raw if n in known or n == "_saved_tensors")
