"""The outputs of a forward in autograd: the graph below them, and the gradients that they get.

An eager warmup step records them for a sampled call (`watched`), and the capture runs its backward
with gradients of these layouts (`OutputGradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.layout import dense_strides
from chunkgraph.engine.tree import Call, distinct_tensors, flatten, unflatten

_task_id = torch._C._current_graph_task_id


def nodes_below(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield every node of the graph below ``outputs``, each once."""
    stack: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)


def leaves_below(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves below ``outputs``, each once."""
    leaves = [getattr(node, "variable", None) for node in nodes_below(outputs)]
    own = [t for t in outputs if t.grad_fn is None and t.requires_grad]
    return list({id(t): t for t in (*leaves, *own) if t is not None}.values())


@dataclass
class BackwardSample:
    """Facts about one backward, filled in when it runs.

    Attributes:
        strides: for each differentiable output, the strides of its gradient, or None if it got no
            gradient; None as a whole before the backward has run.
        autocast: the autocast setting of the backward.
        is_observable: whether the gradient of an output can be observed.
        assumed: ``strides`` before the first gradient; strides where none can be observed.
        siblings: those of all calls of the chunk in one step, this one included.
        shares_pass: whether one backward pass ran through several calls of the chunk.
    """

    strides: tuple[tuple[int, ...] | None, ...] | None = None
    autocast: Autocast | None = None
    is_observable: bool = False
    assumed: tuple[tuple[int, ...] | None, ...] = ()
    siblings: list[BackwardSample] = field(default_factory=list)
    shares_pass: bool = False
    _task: int = -1  # torch's number of the first backward pass

    def note(self, place: int, num_outputs: int, grad: torch.Tensor | None) -> None:
        """Record the gradient of output ``place``, unless another pass was the first."""
        if grad is None:
            return
        if self.strides is None:
            self.strides, self._task = self.assumed or (None,) * num_outputs, _task_id()
            if sum(other._task == self._task for other in self.siblings) > 1:
                for other in self.siblings:
                    other.shares_pass = True
        self.note_autocast(grad)
        if self._task == _task_id():
            self.strides = (*self.strides[:place], grad.stride(), *self.strides[place + 1 :])

    def note_autocast(self, grad: torch.Tensor) -> None:
        """Record the autocast setting of the first backward."""
        if self.autocast is None:
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
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        ctx.sample.note(*ctx.place, grad)
        return None, None, grad


def watched(result: Any, sample: BackwardSample) -> Any:
    """Return ``result`` with its differentiable tensors passed through nodes, to fill ``sample``.

    A result that holds a parameter is returned unchanged, since a node would change the order in
    which the parameter's gradients are summed. Hooks then record the gradients of outputs, except
    for parameters and outputs from which others are computed: they would see whole sums.
    """
    leaves, spec = flatten(result)
    outputs = [tensor for tensor in distinct_tensors(leaves) if tensor.requires_grad]
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in outputs):
        are_sums = [tensor.is_leaf or _is_below_others(tensor, outputs) for tensor in outputs]
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
    sample.is_observable = bool(outputs)
    num = len(outputs)
    passed = {id(t): _Watch.apply(sample, (i, num), t) for i, t in enumerate(outputs)}
    return unflatten([passed.get(id(leaf), leaf) for leaf in leaves], spec)


def _is_below_others(output: torch.Tensor, outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether others of ``outputs`` are computed from ``output``."""
    return output.grad_fn in set(nodes_below(other for other in outputs if other is not output))


@dataclass(frozen=True)
class OutputGradients:
    """The gradients that enter a backward.

    Attributes:
        receiving: positions, among the tensors of the result, of outputs that get a gradient.
        strides: strides of each of these gradients.
        autocast: autocast setting of the backward; None: the current one.
        has_layouts: whether the strides were observed in a warmup step.
    """

    receiving: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    autocast: Autocast | None
    has_layouts: bool

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], sample: Call) -> OutputGradients:
        """Return the gradients observed in the sample's backward; by default, one per output.

        Args:
            tensors: tensors of the result, each once.
            sample: the sampled call.
        """
        positions = [i for i, t in enumerate(tensors) if t.requires_grad]
        observed = sample.backward or BackwardSample()
        strides = observed.strides
        if strides is None:
            strides = tuple(dense_strides(tensors[i]) for i in positions)
        received = [(i, s) for i, s in zip(positions, strides, strict=True) if s is not None]
        return OutputGradients(
            tuple(i for i, _ in received),
            tuple(s for _, s in received),
            observed.autocast,
            has_layouts=observed.strides is not None,
        )

    def casting(self) -> AbstractContextManager[None]:
        """Apply the backward's autocast setting in this block."""
        return self.autocast.entered() if self.autocast is not None else nullcontext()
