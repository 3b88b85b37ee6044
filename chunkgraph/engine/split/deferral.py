"""A backward in two halves: record the deferred operators of a trace, and run them later.

In the input half, autograd gets a `DeferredTensor` for each result of a deferred operator: a tensor
that knows its shape but has no memory. The operators are recorded in order with their arguments,
and keep the arguments' memory. The weight half runs them, drops each as soon as it has run, and
hands out the gradients in the order in which they arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.engine.split.trace import BackwardTrace, Geometry
from chunkgraph.errors import CaptureError
from chunkgraph.graphs.operators import (
    OperatorMode,
    replace_leaves,
    run_to_its_end,
    tensors_in,
)

__all__ = ["Deferral", "DeferredTensor"]

_keys = torch._C.DispatchKey
# Deferred operators have passed autocast already.
_CASTING = torch._C.DispatchKeySet(_keys.AutocastCPU) | torch._C.DispatchKeySet(_keys.AutocastCUDA)

Receive = Callable[[int, torch.Tensor], None]
"""Function that takes the index of a parameter and its gradient."""


class _Value:
    """The future result of a deferred operator."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        assert self.tensor is not None
        return self.tensor


class DeferredTensor(torch.Tensor):
    """A placeholder for a tensor that the weight half computes. Reading its memory is an error."""

    value: _Value

    @staticmethod
    def __new__(cls, geometry: Geometry) -> Self:
        """Create a tensor of this geometry."""
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            geometry.shape,
            strides=geometry.strides,
            dtype=geometry.dtype,
            device=geometry.device,
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


class _Deferred:
    """An operator to run later, with a `_Value` for each tensor that is not computed yet."""

    __slots__ = ("args", "func", "kwargs", "results")

    def __init__(
        self, func: OpOverload, args: Any, kwargs: dict[str, Any], results: Sequence[_Value | None]
    ) -> None:
        self.func, self.args, self.kwargs, self.results = func, args, kwargs, results

    def run(self) -> None:
        args = replace_leaves(self.args, _Value, _Value.get)
        kwargs = {k: replace_leaves(v, _Value, _Value.get) for k, v in self.kwargs.items()}
        out = self.func(*args, **kwargs)
        for value, tensor in zip(self.results, tensors_in(out), strict=True):
            if value is not None:
                value.tensor = tensor


class Deferral(OperatorMode):
    """Run the input half of one backward, and later its weight half.

    The input half is the backward inside ``with deferral``; pass its parameter gradients to `take`.
    The weight half is `run`.

    Args:
        trace: Trace of the same backward.
        label: Label for errors.
    """

    def __init__(self, trace: BackwardTrace, label: str) -> None:
        super().__init__()
        self._trace = trace
        self._label = label
        self._next = 0
        self._entries: deque[_Deferred | tuple[int, _Value | torch.Tensor]] = deque()

    def take(self, index: int, gradient: torch.Tensor) -> None:
        """Keep a gradient that has arrived, computed or deferred, for the weight half."""
        self._entries.append((index, _value_of(gradient)))

    def run(self, receive: Receive) -> None:
        """Run the weight half.

        Args:
            receive: Function that takes the gradients, in the order in which they arrived.

        Raises:
            CaptureError: The input half was not the traced backward.
        """
        if self._next != len(self._trace.operators):
            raise self._other_backward("no further operator")
        with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_CASTING):
            while self._entries:
                entry = self._entries.popleft()
                if isinstance(entry, _Deferred):
                    entry.run()
                    continue
                index, gradient = entry
                del entry
                receive(index, gradient.get() if isinstance(gradient, _Value) else gradient)
                del gradient

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        number, self._next = self._next, self._next + 1
        operators = self._trace.operators
        if number >= len(operators) or operators[number].name != func.name():
            raise self._other_backward(func.name())
        traced = operators[number]
        inputs = tensors_in(*args, *kwargs.values())
        reads_deferred = any(isinstance(t, DeferredTensor) for t in inputs)
        if traced.is_view or not traced.is_deferred:
            if not reads_deferred:
                return run_to_its_end(func, args, kwargs)
            if not traced.is_view:
                raise CaptureError(
                    f"{self._label}: {func} in its backward reads a weight gradient, which is not "
                    "computed yet. Capture the chunk with a whole backward, or use a schedule that "
                    "splits no backward."
                )
        return self._defer(func, args, kwargs, inputs, traced.results)

    def _defer(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[torch.Tensor],
        results: Sequence[Geometry | int],
    ) -> Any:
        out = [inputs[r] if isinstance(r, int) else DeferredTensor(r) for r in results]
        values = [
            None if isinstance(r, int) else tensor.value  # type: ignore[attr-defined]
            for r, tensor in zip(results, out, strict=True)
        ]
        entry = _Deferred(
            func,
            replace_leaves(args, torch.Tensor, _value_of),
            {k: replace_leaves(v, torch.Tensor, _value_of) for k, v in kwargs.items()},
            values,
        )
        self._entries.append(entry)
        return _in_the_form_of(func, out)

    def _other_backward(self, now: str) -> CaptureError:
        operators = self._trace.operators
        known = operators[self._next - 1].name if self._next <= len(operators) else "nothing more"
        return CaptureError(
            f"{self._label}: its backward runs {now} where an earlier pass ran {known}. A split "
            "backward needs the same operators in every pass; capture the chunk with "
            "a whole backward, or use a schedule that splits no backward."
        )


def _value_of(tensor: torch.Tensor) -> Any:
    """Return the value to keep for an argument: a `_Value`, or the tensor without its graph."""
    if isinstance(tensor, DeferredTensor):
        return tensor.value
    if not tensor.requires_grad:
        return tensor
    with _disable_current_modes():  # it would keep a forward's graph, or its own gradient
        return tensor.detach()


def _in_the_form_of(func: OpOverload, results: list[torch.Tensor]) -> Any:
    """Return tensors in the structure that ``func`` returns."""
    returns = func._schema.returns
    if len(returns) == 1:
        return results[0] if isinstance(returns[0].type, torch.TensorType) else results
    return tuple(results)
