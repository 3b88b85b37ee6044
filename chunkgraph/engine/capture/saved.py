"""Read the tensors that a forward keeps for its backward from the autograd graph, by layer.

They are the only values between a chunk's input and output that a replay leaves in memory. They are
recorded by address, because references would change the memory under verification. Tensors that a
custom function keeps in its own attributes are not seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.engine.bits import has_memory, has_nan, same_bits
from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.output_gradients import nodes_below
from chunkgraph.engine.layout import span
from chunkgraph.graphs import AddressRanges, tensor_at


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that an operator kept for its backward.

    Attributes:
        layer: the layer whose forward ran the operator; "" if unknown.
        operator: the autograd node, and the name under which it keeps the tensor.
        address: address of the first element; the memory may be freed.
        tensor: the tensor, or its digest; None if only its address is recorded.
    """

    layer: str
    operator: str
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor | None = None

    def seen_in(self, memory: AddressRanges) -> SavedTensor:
        """Return the record with its present contents if all of it lies in ``memory``."""
        own = AddressRanges([(self.address, self.address + self.num_bytes)])
        is_there = (own & memory).num_bytes == self.num_bytes
        return replace(self, tensor=self.read() if is_there else None)

    def read(self) -> torch.Tensor:
        """Return a tensor on the present contents; the caller ensures that the memory exists."""
        data = tensor_at(self.address, self.num_bytes, self.device).view(self.dtype)
        return data.as_strided(self.shape, self.stride, 0)

    @property
    def num_bytes(self) -> int:
        """Return the bytes from its first to its last element."""
        return span(self.shape, self.stride) * self.dtype.itemsize


def first_difference(replayed: Sequence[SavedTensor], eager: Sequence[SavedTensor]) -> str:
    """Return the first layer that keeps another tensor than in an eager pass; "" if none does."""

    def is_equal(i: int, tensor: torch.Tensor) -> bool:
        if i >= len(eager):
            return False
        mine, other = replayed[i], eager[i]
        if (mine.operator, mine.shape, mine.dtype) != (other.operator, other.shape, other.dtype):
            return False
        if other.tensor is None or mine.device != other.device:
            return True  # attention keeps its seed on the device in a capture, else on the host
        return same_bits(tensor, other.tensor)

    return _first_wrong(replayed, is_equal)


def first_nan(saved: Sequence[SavedTensor]) -> str:
    """Return the first layer that keeps a tensor with a NaN; "" if none does."""
    return _first_wrong(saved, lambda _, tensor: not has_nan([tensor]))


def _first_wrong(
    saved: Sequence[SavedTensor], is_right: Callable[[int, torch.Tensor], bool]
) -> str:
    """Return the layer of the first wrong tensor, and what it keeps; "" if none is wrong.

    Args:
        saved: the tensors; those that are None are skipped.
        is_right: called with the index of a tensor and the tensor.
    """
    before = ""
    for i, record in enumerate(saved):
        if record.tensor is None:
            continue
        if not is_right(i, record.tensor):
            kept = f"it keeps {record.operator}, shape {record.shape}"
            if before not in ("", record.layer):
                kept += f"; the last correct tensor is kept by {before}"
            return f"{record.layer or '(outside of any layer)'} ({kept})"
        before = record.layer
    return ""


def what_follows(saved: Sequence[SavedTensor]) -> str:
    """Return the name of the layer in error if all that a forward keeps is right."""
    if not saved:
        return "unknown (nothing that is kept for the backward can be compared)"
    return f"{saved[-1].layer or 'the chunk'}, or what follows it (all that it keeps is right)"


def saved_tensors(outputs: Sequence[Any], watch: LayerWatch) -> list[SavedTensor]:
    """Return the tensors that a forward keeps, in the order of its operators.

    Args:
        outputs: results of the forward; the autograd graph must be alive.
        watch: the watch that followed the forward.
    """
    # Hide these operators from recorders that are active.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        entries: list[tuple[int, SavedTensor]] = []
        for node in nodes_below(t for t in outputs if isinstance(t, torch.Tensor)):
            number = node._sequence_nr()
            for name, tensor in _saved_by(node):
                saved = SavedTensor(
                    layer=watch.layer_of(number),
                    operator=f"{node.name()}.{name}",
                    address=tensor.data_ptr(),
                    shape=tuple(tensor.shape),
                    stride=tuple(tensor.stride()),
                    dtype=tensor.dtype,
                    device=tensor.device,
                    tensor=tensor.detach(),
                )
                entries.append((number, saved))
        return [saved for _, saved in sorted(entries, key=lambda e: (e[0], e[1].operator))]


def _saved_by(node: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of the tensors that a node keeps for its backward."""
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
    # Skip wrappers (quantized tensors), whose parts the node keeps too, and freed memory.
    return [
        (name, t) for name, t in kept if type(t) in (torch.Tensor, nn.Parameter) and has_memory(t)
    ]


def _is_plain(raw: Any) -> bool:
    """Return whether reading a saved value calls no hook, which might recompute a forward."""
    values = raw if isinstance(raw, (tuple, list)) else (raw,)
    return all(getattr(saved, "unpack_hook", _is_plain) is None for saved in values)


@functools.cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    raw = [n.removeprefix("_raw") for n in dir(kind) if n.startswith("_raw_saved_")]
    known = dir(kind)
    return tuple(n for n in raw if n in known or n == "_saved_tensors")
