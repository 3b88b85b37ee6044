"""Compare memory layouts, and keep them in copies.

Kernels choose their algorithm by the strides of what they read, so equal bits need equal strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from chunkgraph.graphs import AddressRange


def same_layout(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether strides ``a`` and ``b`` place the elements of ``shape`` at the same offsets.

    Strides of dimensions with at most one element have no meaning, nor do those of empty tensors.
    """
    if a == b or 0 in shape:
        return True
    return all(n == 1 or x == y for n, x, y in zip(shape, a, b, strict=True))


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy of ``tensor``: its own strides if it is dense."""
    return torch.empty_like(tensor, device="meta", requires_grad=False).stride()


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last in memory, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def memory_of(tensor: torch.Tensor) -> AddressRange | None:
    """Return the addresses from the first to the last element of ``tensor``; None if empty."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return None
    return AddressRange(start, start + span(tensor.shape, tensor.stride()) * tensor.element_size())


def copy_into(target: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Return a function that copies a tensor of the same layout into ``target``.

    Expanded dimensions (stride 0) are copied once: torch refuses to write them.
    """
    strides = target.stride()
    shape = [min(n, 1) if d == 0 else n for n, d in zip(target.shape, strides, strict=True)]
    if target.shape == tuple(shape):
        return target.copy_
    once = target.as_strided(shape, strides)

    def copy(tensor: torch.Tensor) -> None:
        once.copy_(tensor.as_strided(shape, strides))

    return copy


def duplicate(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies a tensor of this layout, strides included, to new memory."""
    shape, strides = tensor.shape, tensor.stride()
    if dense_strides(tensor) == strides:
        return torch.clone
    num_elements = span(shape, strides)

    def copy(source: torch.Tensor) -> torch.Tensor:
        # All elements between the first and the last, so that the strides fit the copy. No view of
        # them: autograd lets nobody change the views that one node returns.
        flat = source.as_strided((num_elements,), (1,)).clone()
        return flat.set_(flat.untyped_storage(), 0, shape, strides)

    return copy
