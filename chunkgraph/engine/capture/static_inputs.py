"""The tensors that a graph reads as its inputs, and calls of a chunk with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.autograd_graph import edges_to_leaves, nodes_below
from chunkgraph.engine.capture.layers import parameter_names
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.layout import dense_strides, span
from chunkgraph.engine.plain_values import key_of
from chunkgraph.engine.signature import Call, flatten_call
from chunkgraph.errors import CaptureError
from chunkgraph.graphs.operators import CastWatch

__all__ = [
    "SlotStatics",
    "call_with",
    "deciding_inputs",
    "stale_casts_refused",
    "static_like",
    "summed_inputs",
]


def call_with(
    chunk: Chunk,
    sample: Call,
    inputs: Sequence[torch.Tensor],
    results: dict[int, torch.Tensor] | None = None,
) -> Any:
    """Run the chunk's forward with a sample's plain values and autocast and with these tensors.

    Args:
        chunk: the chunk to run, with gradients enabled.
        sample: the call.
        inputs: tensors that replace the call's tensors.
        results: filled in the backward with the gradients, by id, of inputs that were not leaves
            for the caller; in their own layout, which ``.grad`` of a leaf does not keep.

    Raises:
        CaptureError: the forward changes the contents of an argument.
    """
    autocast = sample.autocast.entered() if sample.autocast is not None else nullcontext()
    with torch.enable_grad(), autocast:
        tensors = [
            _AsResult.apply(t, results) if i in sample.results else t for i, t in enumerate(inputs)
        ]
        args, kwargs = sample.filled(tensors).arguments()
        contents = _contents(args, kwargs)
        result = chunk.forward(*args, **kwargs)
    if _contents(args, kwargs) != contents:
        raise CaptureError(
            f"{chunk.label}: its forward changes the contents of an argument (appends to a list, "
            "sets an attribute). A replay runs no Python and would not change it. Return the "
            "value from the forward."
        )
    return result


@contextmanager
def stale_casts_refused(chunk: Chunk, autocast: Autocast | None) -> Iterator[None]:
    """Refuse a forward that updates parameters while autocast caches casts of them.

    Eager training reuses such a cast for the whole autocast block, which may have many calls; a
    replay casts the current value.

    Raises:
        CaptureError: the forward does this; the message names the parameters and the line.
    """
    if autocast is None or not autocast.keeps_casts:
        yield
        return
    with CastWatch(chunk.parameters) as watch:
        yield
    names = zip(parameter_names(chunk), chunk.parameters, strict=True)
    written = [(name, place) for name, p in names if (place := watch.place_written(p))]
    if written:
        raise CaptureError(
            f"{chunk.label}: its forward updates {', '.join(name for name, _ in written)} in "
            f"place while autocast caches a cast of it.\n  at {written[0][1]}\nEager training uses "
            "the old cast until the torch.autocast block ends; a replay casts the new value.\n"
            "  To do: use torch.autocast(cache_enabled=False), or update parameters between steps."
        )


def _contents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    call = flatten_call(args, kwargs)
    values = [id(v) if isinstance(v, torch.Tensor) else key_of(v) for v in call.leaves]
    return call.spec, values


def deciding_inputs(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Return the numbers of the inputs without which an output would not require grad.

    Args:
        outputs: results of the forward that require grad.
        inputs: see `call_with`.
    """
    numbers = {id(tensor): i for i, tensor in enumerate(inputs)}
    deciding: set[int] = set()
    for output in outputs:
        leaves = [numbers.get(id(leaf)) for leaf in edges_to_leaves([output])]
        if None not in leaves:  # it depends on no parameter
            deciding.update(i for i in leaves if i is not None)
    return tuple(sorted(deciding))


def summed_inputs(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Return the numbers of the inputs that a forward reads several times.

    Args:
        outputs: results of the forward that get a gradient; one may be an input itself.
        inputs: see `call_with`.
    """
    reads = Counter(parent for node in nodes_below(outputs) for parent, _ in node.next_functions)
    reads.update(torch.autograd.graph.get_gradient_edge(tensor).node for tensor in outputs)
    num_reads: Counter[int] = Counter()
    for node, num in reads.items():
        is_result = isinstance(node, _AsResult._backward_cls)
        leaf = getattr(node.next_functions[0][0] if is_result else node, "variable", None)
        num_reads[id(leaf)] = max(num_reads[id(leaf)], num)
    return tuple(i for i, tensor in enumerate(inputs) if num_reads[id(tensor)] > 1)


class _AsResult(torch.autograd.Function):
    """Turn a leaf into the result of an operator on the same memory, as it was for the caller.

    In-place operators refuse leaves, and autocast caches casts only of leaves.
    """

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, results: dict[int, torch.Tensor] | None
    ) -> torch.Tensor:
        ctx.place = id(leaf), results
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        place, results = ctx.place
        if results is None:
            return grad, None
        results[place] = grad.detach()  # a view would keep its base alive
        return None, None


def static_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new leaf with the same values and ``requires_grad`` in its own memory."""
    static = torch.empty_like(tensor, requires_grad=False)
    static.copy_(tensor.detach())
    return static.requires_grad_(tensor.requires_grad)


class SlotStatics:
    """Memory outside all pools that the variants of one slot read, one variant at a time.

    Activations and gradients share memory. Inputs without a gradient do not, because a slot may
    keep a constant input, which another variant would overwrite.

    Args:
        is_shared: whether the slot has several variants.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._memory: dict[tuple[str, int], torch.Tensor] = {}

    def input_like(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the static input of tensor ``index``, with the values of ``tensor``."""
        if not (self._is_shared and tensor.requires_grad):
            return static_like(tensor)
        static = self._place(("input", index), tensor.shape, dense_strides(tensor), tensor)
        return static.copy_(tensor.detach()).requires_grad_()

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
        num_elements = span(output.shape, strides)
        memory = (
            self._place(("gradient", index), (num_elements,), (1,), output)
            if self._is_shared
            else torch.empty(num_elements, dtype=output.dtype, device=output.device)
        )
        return memory.zero_().as_strided(output.shape, strides)

    def _place(
        self, key: tuple[str, int], shape: Sequence[int], strides: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor:
        """Return a new tensor on the shared memory, with its own version counter."""
        num_bytes = span(shape, strides) * like.element_size()
        memory = self._memory.get(key)
        if memory is None or memory.numel() < num_bytes or memory.device != like.device:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
            self._memory[key] = memory
        place = torch.empty(0, dtype=like.dtype, device=like.device)
        return place.set_(memory.untyped_storage(), 0, tuple(shape), tuple(strides))
