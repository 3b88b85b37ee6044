"""Record how the backward of a sampled call ran, so that the capture runs it in the same way."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.autograd_graph import (
    nested_among,
    refuse_changed_outputs,
    refuse_hooks_on_nested,
    sharing_outputs,
)
from chunkgraph.engine.layout import dense_strides
from chunkgraph.engine.signature import flatten, unflatten

__all__ = ["BackwardSample", "watched"]

_task_id = torch._C._current_graph_task_id


@dataclass
class BackwardSample:
    """Facts about one backward, filled in when it runs.

    Attributes:
        strides: for each differentiable output, the strides of its gradient, or None if it got no
            gradient; None as a whole before the backward has run.
        autocast: the autocast setting of the backward.
        label: label of the chunk, for errors.
        is_observable: whether the gradient of an output can be observed.
        assumed: ``strides`` before the first gradient; strides where none can be observed.
        nested: positions of differentiable outputs from which other outputs are computed.
        references: weak references to these outputs, as the caller has them.
        sharing: positions of differentiable outputs that share memory with another one or with an
            argument. Each has its own node, so autograd does not see a change of one in the other.
    """

    strides: tuple[tuple[int, ...] | None, ...] | None = None
    autocast: Autocast | None = None
    label: str = ""
    is_observable: bool = False
    assumed: tuple[tuple[int, ...] | None, ...] = ()
    nested: tuple[int, ...] = ()
    references: Sequence[weakref.ref[torch.Tensor]] = ()
    sharing: tuple[int, ...] = ()
    _task: int = -1  # torch's number of the first backward pass

    def note(self, place: int, num_outputs: int, grad: torch.Tensor | None) -> None:
        """Record the gradient of output ``place``, unless another pass was the first."""
        if grad is None:
            return
        if self.strides is None:
            self.strides, self._task = self.assumed or (None,) * num_outputs, _task_id()
            self.autocast = Autocast.now(grad.device.type)
        if self._task == _task_id():
            self.strides = (*self.strides[:place], grad.stride(), *self.strides[place + 1 :])

    def note_autocast(self, grad: torch.Tensor | None) -> None:
        """Record the autocast setting of the first backward alone."""
        if self.autocast is None and grad is not None:
            self.autocast = Autocast.now(grad.device.type)


class _Watch(torch.autograd.Function):
    """Pass one output through, and record the layout of its gradient.

    An output has its own node: eager training does not run what is below one that the loss skips.
    """

    @staticmethod
    def forward(
        ctx: Any, sample: BackwardSample, place: tuple[int, int], output: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.sample, ctx.place = sample, place
        if place[0] in sample.sharing:
            ctx.save_for_backward(output)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        refuse_changed_outputs(ctx.sample.label, ctx)
        refuse_hooks_on_nested(ctx.sample.label, [nested() for nested in ctx.sample.references])
        ctx.sample.note(*ctx.place, grad)
        return None, None, grad


def watched(result: Any, sample: BackwardSample, arguments: Any, label: str) -> Any:
    """Return ``result`` with its differentiable tensors passed through nodes, to fill ``sample``.

    A change in place of an output that shares memory with another one, or with one of
    ``arguments``, is an error in the backward, as in a replay.

    A result that holds a parameter is returned unchanged, since a node would change the order in
    which the parameter's gradients are summed. Hooks then record the gradients of outputs, except
    for parameters and outputs from which others are computed: they would see whole sums.
    """
    sample.label = label
    leaves, spec = flatten(result)
    outputs = differentiable(leaves)
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in outputs):
        nested = nested_among(outputs)
        are_sums = [tensor.is_leaf or i in nested for i, tensor in enumerate(outputs)]
        sample.assumed = tuple(
            dense_strides(tensor) if is_sum else None
            for tensor, is_sum in zip(outputs, are_sums, strict=True)
        )
        sample.is_observable = not all(are_sums)
        for i, tensor in enumerate(outputs):
            if not are_sums[i]:
                tensor.register_hook(partial(sample.note, i, len(outputs)))
            elif not tensor.is_leaf:
                tensor.register_hook(sample.note_autocast)
        return result
    if not outputs:
        return result
    sample.is_observable = True
    sample.nested = nested_among(outputs)
    sample.sharing = sharing_outputs(outputs, differentiable(flatten(arguments)[0]))
    num = len(outputs)
    passed = {id(t): _Watch.apply(sample, (i, num), t) for i, t in enumerate(outputs)}
    sample.references = [weakref.ref(passed[id(outputs[i])]) for i in sample.nested]
    return unflatten([passed.get(id(leaf), leaf) for leaf in leaves], spec)


def differentiable(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``leaves`` that require grad, each once, in order."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    return list({id(tensor): tensor for tensor in tensors}.values())
