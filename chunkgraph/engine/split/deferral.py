"""A backward in two halves: record the deferred operators of a trace, and run them later.

In the input half, autograd gets a `DeferredTensor` for each result of a deferred operator: a tensor
that knows its shape but has no memory. The operators are recorded in order with their arguments,
and keep the arguments' memory. The weight half runs them, drops each as soon as it has run, and
hands out the gradients in the order in which they arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.engine.program import Receive
from chunkgraph.errors import CaptureError
from chunkgraph.graphs.operators import OperatorMode, replace_leaves, run_to_its_end, tensors_in

REMEDY = "Capture the chunk with a whole backward, or use a schedule that splits no backward."

_keys = torch._C.DispatchKey
# Deferred operators have passed autocast already.
_CASTING = torch._C.DispatchKeySet(_keys.AutocastCPU) | torch._C.DispatchKeySet(_keys.AutocastCUDA)


@dataclass
class _Value:
    """What the weight half computes: not in the placeholder, whose references autograd counts."""

    tensor: torch.Tensor | None = None


class DeferredTensor(torch.Tensor):
    """A placeholder for a tensor that the weight half computes. Reading its memory is an error."""

    value: _Value

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Self:
        """Create a placeholder with the shape, strides, dtype and device of a tensor."""
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.value = _Value()
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: OpOverload, *_: Any
    ) -> Any:
        """Refuse the operator: an active `Deferral` sees operators before this method."""
        raise CaptureError(f"{func} reads a weight gradient before the weight half has run")


@dataclass
class TracedOperator:
    """One operator of a backward.

    Attributes:
        name: Name of the operator.
        is_view: Whether its results are views of its arguments.
        results: For each tensor that it returns, a `DeferredTensor` like it; if the tensor is an
            argument, the argument's number among the tensor arguments.
        must_run: Whether it must not be deferred.
        sources: The operators that wrote the memory that it reads.
        overwritten: The operators that have read the memory that it writes.
        is_deferred: Whether it serves weight gradients alone, once the trace is complete.
    """

    name: str
    is_view: bool
    results: tuple[DeferredTensor | int, ...]
    must_run: bool
    sources: frozenset[int]
    overwritten: frozenset[int]
    is_deferred: bool = False


class Deferral(OperatorMode):
    """Run the input half of one backward, and later its weight half.

    The input half is the backward inside ``with deferral``; pass its parameter gradients to `take`.
    The weight half is `run`.

    Args:
        trace: The operators of the same backward.
        label: Label for errors.
    """

    def __init__(self, trace: Sequence[TracedOperator], label: str) -> None:
        super().__init__()
        self._trace = trace
        self._label = label
        self._next = 0
        self._work: deque[Callable[[Receive], None]] = deque()

    def take(self, index: int, gradient: torch.Tensor) -> None:
        """Keep a gradient that has arrived, computed or deferred, for the weight half."""
        kept = _kept(gradient)
        self._work.append(lambda receive: receive(index, _computed(kept)))

    def run(self, receive: Receive) -> None:
        """Run the weight half.

        Args:
            receive: Function that takes the gradients, in the order in which they arrived.

        Raises:
            CaptureError: The input half was not the traced backward.
        """
        if self._next != len(self._trace):
            raise self._other_backward("no further operator")
        with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_CASTING):
            while self._work:
                self._work.popleft()(receive)

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        number, self._next = self._next, self._next + 1
        if number >= len(self._trace) or self._trace[number].name != func.name():
            raise self._other_backward(func.name())
        traced = self._trace[number]
        inputs = tensors_in(*args, *kwargs.values())
        reads_deferred = any(isinstance(t, DeferredTensor) for t in inputs)
        if traced.is_view or not traced.is_deferred:
            if not reads_deferred:
                return run_to_its_end(func, args, kwargs)
            if not traced.is_view:
                raise CaptureError(
                    f"{self._label}: {func} in its backward reads a weight gradient, which is not "
                    f"computed yet. {REMEDY}"
                )
        out = [inputs[r] if isinstance(r, int) else DeferredTensor(r) for r in traced.results]
        kept = replace_leaves((args, kwargs), torch.Tensor, _kept)
        values = [t.value if isinstance(t, DeferredTensor) else None for t in out]

        def run(_: Receive) -> None:
            args, kwargs = replace_leaves(kept, _Value, _computed)
            for value, tensor in zip(values, tensors_in(func(*args, **kwargs)), strict=True):
                if value is not None:
                    value.tensor = tensor

        self._work.append(run)
        return _in_the_form_of(func, out)

    def _other_backward(self, now: str) -> CaptureError:
        known = [*(o.name for o in self._trace), "nothing more"][self._next - 1]
        return CaptureError(
            f"{self._label}: its backward runs {now} where an earlier pass ran {known}. A split "
            f"backward needs the same operators in every pass. {REMEDY}"
        )


def _kept(tensor: torch.Tensor) -> torch.Tensor | _Value:
    """Return what is kept of an argument: its value, or the tensor without its autograd graph."""
    if isinstance(tensor, DeferredTensor):
        return tensor.value
    if not tensor.requires_grad:
        return tensor
    with _disable_current_modes():  # it would keep a forward's graph, or its own gradient
        return tensor.detach()


def _computed(kept: torch.Tensor | _Value) -> torch.Tensor:
    """Return the tensor that `_kept` stands for."""
    tensor = kept.tensor if isinstance(kept, _Value) else kept
    assert tensor is not None
    return tensor


def _in_the_form_of(func: OpOverload, results: list[torch.Tensor]) -> Any:
    """Return tensors in the structure that ``func`` returns."""
    returns = func._schema.returns
    if len(returns) == 1:
        return results[0] if isinstance(returns[0].type, torch.TensorType) else results
    return tuple(results)
