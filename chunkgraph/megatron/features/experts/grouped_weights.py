"""The weights of a layer's experts as one tensor, and gradients of experts without rows."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch
from torch import library

__all__ = ["as_one", "lay_together", "zero_empty"]

_ALIGNMENT_BYTES = 16


def as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return weights [out, in] as one tensor [experts, out, in].

    The result is a view if the weights have even distances in one storage, as after `lay_together`,
    otherwise a copy.
    """
    first = weights[0].detach()
    step_bytes = _even_step_bytes(weights)
    if step_bytes is None:
        return torch.stack([weight.detach() for weight in weights])
    shape = (len(weights), *first.shape)
    return first.as_strided(shape, (step_bytes // first.element_size(), *first.stride()))


def lay_together(weights: Sequence[torch.nn.Parameter]) -> bool:
    """Move weights into one storage, so that `as_one` copies nothing.

    The parameters stay the same objects. Weights that share memory with other tensors, such as a
    buffer of Megatron's optimizer, are not moved.

    Returns:
        Whether the weights are in one storage now.
    """
    if _even_step_bytes(weights) is not None:
        return True
    if any(w.untyped_storage().nbytes() != w.numel() * w.element_size() for w in weights):
        return False
    with torch.no_grad():
        together = torch.stack([weight.detach() for weight in weights])
        for weight, place in zip(weights, together, strict=True):
            weight.data = place
    return True


def zero_empty(grads: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Write zeros to ``grads`` [experts, out, in] of experts without rows, and return them.

    A grouped product does not write the gradients of these experts. This is one operator of torch
    on each device: a split backward sees that it reads and writes weight gradients.
    """
    torch.ops.chunkgraph.zero_empty(grads, ends)
    return grads


def _zero_empty(grads: torch.Tensor, ends: torch.Tensor) -> None:
    if grads.is_cuda and importlib.util.find_spec("triton") is not None:
        kernel = importlib.import_module("chunkgraph.megatron.features.experts.empty_kernel")
        kernel.zero_empty(grads, ends)
        return
    begins = torch.nn.functional.pad(ends[:-1], (1, 0))
    grads.masked_fill_((ends == begins)[:, None, None], 0)


_LIBRARY = library.Library("chunkgraph", "FRAGMENT")
_LIBRARY.define("zero_empty(Tensor(a!) grads, Tensor ends) -> ()")
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("zero_empty", _zero_empty, _device)


def _even_step_bytes(weights: Sequence[torch.Tensor]) -> int | None:
    """Return the distance between consecutive weights; None if it is uneven."""
    first = weights[0]
    num_bytes = first.numel() * first.element_size()
    if not all(w.is_contiguous() and w.shape == first.shape for w in weights):
        return None
    if len(weights) == 1:
        return num_bytes
    start, storage = first.data_ptr(), first.untyped_storage()
    step_bytes = weights[1].data_ptr() - start
    is_even = all(w.data_ptr() == start + i * step_bytes for i, w in enumerate(weights))
    lies_inside = start + (len(weights) - 1) * step_bytes + num_bytes <= (
        storage.data_ptr() + storage.nbytes()
    )
    if is_even and lies_inside and step_bytes >= num_bytes and not step_bytes % _ALIGNMENT_BYTES:
        return step_bytes
    return None
