"""What a forward keeps for its backward, read from the autograd graph by layer.

A replay leaves nothing behind between a chunk's input and output but these tensors. They are
remembered by address, as the graph itself remembers them: to hold them would change the memory
that is to be verified. What a custom function keeps in attributes of its own is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.engine.autograd_graph import kept_by, nodes_below
from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.verify.bits import has_nan, same_bits
from chunkgraph.graphs import AddressRanges, tensor_at

__all__ = ["Place", "SavedTensor", "first_difference", "first_nan", "saved_tensors"]

_NO_NUMBER = 1 << 62


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that an operator kept for its backward.

    Attributes:
        layer: whose forward ran the operator; "" where that is unknown.
        operator: the node of autograd, and what it calls the tensor.
        address: of its first element; it may be freed by now.
        tensor: the tensor itself, or None where only the address is remembered.
    """

    layer: str
    operator: str
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor | None = None

    def forgotten(self) -> SavedTensor:
        """The same without the tensor."""
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
        """Whether all of it lies in ``memory``."""
        start, end = self._span()
        return start < end and (AddressRanges([(start, end)]) & memory).num_bytes == end - start

    def read(self) -> torch.Tensor:
        """A tensor on the address as it is now; whoever calls knows that the memory is there."""
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
    """Where among the kept tensors something first shows.

    Attributes:
        first: the first one that shows it.
        before: the layer of the last one before it that does not, or "".
        instead: what an eager pass keeps in its place, where that is something else.
    """

    first: SavedTensor
    before: str
    instead: str = ""

    def __str__(self) -> str:
        kept = f"{self.first.operator}, shape {self.first.shape}{self.instead}"
        layer = self.first.layer or "(outside of any layer)"
        if self.before and self.before != self.first.layer:
            return (
                f"{layer} (it keeps {kept}; the last that is right is kept by {self.before}: the "
                "cause is between the two)"
            )
        return f"{layer} (it keeps {kept})"


def saved_tensors(outputs: Sequence[Any], watch: LayerWatch) -> list[SavedTensor]:
    """What the forward that made ``outputs`` keeps, in the order in which it ran.

    Args:
        outputs: results of the forward; the autograd graph must be alive.
        watch: watched that forward.
    """
    # Some are not to be seen by whoever records operators at the moment: numbers instead of
    # tensors, for example.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return _walk(outputs, watch)


def _walk(outputs: Sequence[Any], watch: LayerWatch) -> list[SavedTensor]:
    found: list[tuple[int, str, SavedTensor]] = []
    for node in nodes_below(t for t in outputs if isinstance(t, torch.Tensor)):
        number = node._sequence_nr()
        for name, tensor in kept_by(node):
            kind = f"{node.name()}.{name}"
            found.append((number, kind, _of(tensor, watch.layer_of(number), kind)))
    found = [entry for entry in found if entry[0] < _NO_NUMBER]
    return [saved for _, _, saved in sorted(found, key=lambda entry: entry[:2])]


def first_difference(
    replayed: Sequence[SavedTensor], eager: Sequence[SavedTensor], memory: AddressRanges
) -> Place | None:
    """The first kept tensor in ``memory`` whose value now differs from the eager pass's.

    Also where the eager pass kept something else than the capture did; None if nothing differs.
    """
    before = ""
    for i, mine in enumerate(replayed):
        if i >= len(eager) or _kind(mine) != _kind(eager[i]):
            other = f"{eager[i].operator}, shape {eager[i].shape}" if i < len(eager) else "nothing"
            return Place(mine, before, f", where the eager pass keeps {other}")
        theirs = eager[i].tensor
        if theirs is None or not mine.lies_in(memory):
            continue
        if theirs.device != mine.device:
            continue  # attention keeps its seed on the device in a capture, else on the host
        if not same_bits(mine.read(), theirs):
            return Place(mine, before)
        before = mine.layer
    return None


def first_nan(replayed: Sequence[SavedTensor], memory: AddressRanges) -> Place | None:
    """The first kept tensor in ``memory`` that holds a NaN now."""
    before = ""
    for mine in replayed:
        if not mine.lies_in(memory):
            continue
        if has_nan([mine.read()]):
            return Place(mine, before)
        before = mine.layer
    return None


def _of(tensor: torch.Tensor, layer: str, operator: str) -> SavedTensor:
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
