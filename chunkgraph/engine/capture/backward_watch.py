"""Record how the backward of a sampled call ran, so that the capture runs it in the same way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.autograd_graph import nested_among, refuse_hooks_on_nested
from chunkgraph.engine.signature import flatten, unflatten

__all__ = ["BackwardSample", "watched"]


@dataclass
class BackwardSample:
    """Facts about one backward, filled in when it runs.

    Attributes:
        strides: for each differentiable output, the strides of its gradient, or None if it got no
            gradient; None as a whole before the backward has run.
        autocast: the autocast setting of the backward.
        label: label of the chunk, for errors.
        nested: positions of differentiable outputs from which other outputs are computed.
    """

    strides: tuple[tuple[int, ...] | None, ...] | None = None
    autocast: Autocast | None = None
    label: str = ""
    nested: tuple[int, ...] = ()

    def hook(self, device_type: str) -> Callable[[torch.Tensor], None]:
        """Return a hook of an output that records the autocast setting of the first backward."""

        def record(_grad: torch.Tensor) -> None:
            if self.autocast is None:
                self.autocast = Autocast.now(device_type)

        return record


class _Watch(torch.autograd.Function):
    """Pass tensors through, and record the layout of their gradients."""

    @staticmethod
    def forward(ctx: Any, sample: BackwardSample, *outputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.sample, ctx.device_type = sample, outputs[0].device.type
        passed = tuple([tensor.detach() for tensor in outputs])
        ctx.nested = [weakref.ref(passed[i]) for i in sample.nested]
        return passed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        refuse_hooks_on_nested(ctx.sample.label, [reference() for reference in ctx.nested])
        if ctx.sample.strides is None:
            ctx.sample.strides = tuple(None if g is None else g.stride() for g in grads)
            ctx.sample.autocast = Autocast.now(ctx.device_type)
        return (None, *grads)


def watched(result: Any, sample: BackwardSample) -> Any:
    """Return ``result`` with its differentiable tensors passed through a node, to fill ``sample``.

    A result that holds a parameter is returned unchanged, since a node would change the order in
    which the parameter's gradients are summed; hooks then record the autocast setting alone.
    """
    leaves, spec = flatten(result)
    outputs = differentiable(leaves)
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in outputs):
        for tensor in outputs:
            if not tensor.is_leaf:
                tensor.register_hook(sample.hook(tensor.device.type))
        return result
    if not outputs:
        return result
    sample.nested = nested_among(outputs)
    passed = dict(zip(map(id, outputs), _Watch.apply(sample, *outputs), strict=True))
    return unflatten([passed.get(id(leaf), leaf) for leaf in leaves], spec)


def differentiable(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``leaves`` that require grad, each once, in order."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    return list({id(tensor): tensor for tensor in tensors}.values())
