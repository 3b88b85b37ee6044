"""The tensors that a graph reads as its inputs, and calls of a chunk with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.layout import dense_strides, span
from chunkgraph.engine.tree import Call, flatten
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import Pool

__all__ = ["SlotStatics", "call_with", "static_like"]


def call_with(
    chunk: Chunk,
    sample: Call,
    inputs: Sequence[torch.Tensor],
    grads: dict[int, torch.Tensor] | None = None,
) -> Any:
    """Run the chunk's forward with a sample's plain values and autocast and with these tensors.

    Args:
        chunk: the chunk to run, with gradients enabled.
        sample: the call.
        inputs: tensors that replace the call's tensors.
        grads: filled in the backward with the gradients, by id, of the sample's ``non_leaves``; in
            their own layout, which ``.grad`` of a leaf does not keep.

    Raises:
        CaptureError: the forward changes a list or dict among the arguments.
    """
    autocast = sample.autocast.entered() if sample.autocast is not None else nullcontext()
    with torch.enable_grad(), autocast:
        tensors = [
            _NonLeaf.apply(t, grads) if i in sample.non_leaves else t for i, t in enumerate(inputs)
        ]
        call = sample.filled(tensors)
        args, kwargs = call.arguments()
        result = chunk.forward(*args, **kwargs)
    leaves, spec = flatten((args, kwargs))
    if spec != call.spec or [*map(id, leaves)] != [*map(id, call.leaves)]:
        raise CaptureError(
            f"{chunk.label}: its forward changes the contents of an argument (appends to a list, "
            "sets a key of a dict). A replay runs no Python and would not change it. Return the "
            "value from the forward."
        )
    return result


class _NonLeaf(torch.autograd.Function):
    """Turn a leaf into the result of an operator on the same memory, as it was for the caller.

    In-place operators refuse leaves, and autocast caches casts only of leaves.
    """

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, grads: dict[int, torch.Tensor] | None
    ) -> torch.Tensor:
        ctx.place = id(leaf), grads
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        place, grads = ctx.place
        if grads is None:
            return grad, None
        grads[place] = grad.detach()  # a view would keep its base alive
        return None, None


def static_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new leaf with the same values and ``requires_grad`` in its own memory."""
    static = torch.empty_like(tensor, requires_grad=False)
    static.copy_(tensor.detach())
    return static.requires_grad_(tensor.requires_grad)


class SlotStatics:
    """Memory, not of graphs, that the variants of one slot read, one variant at a time.

    Activations and gradients share memory. Inputs without a gradient do not, because a slot may
    keep a constant input, which another variant would overwrite.

    Args:
        pool: where the memory lies; None: outside of all pools.
    """

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pool
        self._memory: dict[tuple[str, int], torch.UntypedStorage] = {}

    def input_like(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the static input of tensor ``index``, with the values of ``tensor``."""
        if type(tensor) is not torch.Tensor:
            return static_like(tensor)
        key = ("input", index) if tensor.requires_grad else ("constant", len(self._memory))
        static = self._place(key, tensor.shape, dense_strides(tensor), tensor)
        return static.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    def gradient_like(
        self, index: int, output: torch.Tensor, strides: Sequence[int] | None
    ) -> torch.Tensor:
        """Return the static gradient, all zero, of differentiable output ``index``.

        Args:
            index: number of the output.
            output: the output.
            strides: strides of the gradient; None: those of the output.
        """
        strides = dense_strides(output) if strides is None else tuple(strides)
        size = span(output.shape, strides)
        memory = self._place(("gradient", index), (size,), (1,), output)
        return memory.zero_().as_strided(output.shape, strides)

    def _place(
        self, key: tuple[str, int], shape: Sequence[int], strides: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor:
        """Return a new tensor on the shared memory, with its own version counter."""
        num_bytes = span(shape, strides) * like.element_size()
        memory = self._memory.get(key)
        if memory is None or memory.nbytes() < num_bytes or memory.device != like.device:
            if self._pool is not None and self._pool.device == like.device:
                memory = self._pool.allocate(max(1, num_bytes))
            else:
                new = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
                memory = new.untyped_storage()
            self._memory[key] = memory
        place = torch.empty(0, dtype=like.dtype, device=like.device)
        return place.set_(memory, 0, tuple(shape), tuple(strides))
