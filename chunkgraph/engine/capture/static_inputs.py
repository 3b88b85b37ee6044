"""The tensors that a graph reads as its inputs, and calls of a chunk with them.

A slot loads constant inputs only once. torch counts the writes to a tensor (``_version``), also
those to views. It does not count writes through ``.data``, by a collective, by another graph's
replay or by a kernel that torch does not know. So equal counts prove equal values only for a
tensor without such writes, which its owner must promise by `mark_constant`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.layout import dense_strides, span
from chunkgraph.engine.tree import Call, flatten
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import Pool


def call_with(
    chunk: Chunk,
    sample: Call,
    inputs: Sequence[torch.Tensor],
    grads: dict[int, torch.Tensor] | None = None,
) -> Any:
    """Run the chunk's forward with a sample's plain values and autocast and with these tensors.

    Args:
        chunk: the chunk to run.
        sample: the call.
        inputs: tensors that replace the call's tensors.
        grads: filled in the backward with the gradients, by id, of the sample's ``non_leaves``; in
            their own layout, which ``.grad`` of a leaf does not keep.

    Raises:
        CaptureError: the forward changes a list or dict among the arguments.
    """
    autocast = sample.autocast.entered() if sample.autocast is not None else nullcontext()
    with torch.set_grad_enabled(chunk.enables_grad), autocast:
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
        self, index: int, output: torch.Tensor, strides: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the static gradient, all zero, of differentiable output ``index``."""
        memory = self._place(("gradient", index), (span(output.shape, strides),), (1,), output)
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


_MARK = "_chunkgraph_constant"


def mark_constant(tensor: torch.Tensor) -> torch.Tensor:
    """Promise that only ordinary torch operators write to ``tensor``, if any do.

    As an argument of a captured chunk it is then copied into each slot only once, and again after
    every write. Meant for masks, position ids and tables that many microbatches share. The promise
    is broken by writes through ``.data`` or NumPy, by a collective or a graph's replay, by a custom
    kernel, or in the chunk itself.

    Args:
        tensor: the object to pass to the chunk; an alias of it is not constant.

    Returns:
        The same object.
    """
    if not tensor.is_inference():  # inference tensors have no version counter: always copied
        setattr(tensor, _MARK, True)
    return tensor


class LoadedSource(NamedTuple):
    """The tensor from which a static input was last loaded, and its count of writes then.

    The reference keeps the tensor's id and memory from being reused.
    """

    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> LoadedSource | None:
        """Return the record of a constant tensor; None for other tensors."""
        return LoadedSource(tensor, tensor._version) if hasattr(tensor, _MARK) else None

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` still holds the values that were loaded."""
        return tensor is self.tensor and tensor._version == self.version
