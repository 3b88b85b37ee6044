"""The tensors that a graph reads as its inputs, and calls of a chunk with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.signature import Call, unflatten

__all__ = ["call_with", "static_like"]


def call_with(chunk: Chunk, sample: Call, inputs: Sequence[torch.Tensor]) -> Any:
    """Run the chunk with a sample's plain values and casting and these tensors, with gradients."""
    given = iter(inputs)
    leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in sample.leaves]
    args, kwargs = unflatten(leaves, sample.spec)
    autocast = sample.autocast.entered() if sample.autocast is not None else nullcontext()
    with torch.enable_grad(), autocast:
        return chunk.forward(*args, **kwargs)


def static_like(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf of its own memory with the same values and grad flag."""
    static = torch.empty_like(tensor, requires_grad=False)
    static.copy_(tensor.detach())
    return static.requires_grad_(tensor.requires_grad)
