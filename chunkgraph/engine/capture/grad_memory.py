"""``param.grad`` of parameters without a ``main_grad``, and the memory that graphs add to.

Graphs add to fixed memory, the *sinks*, all in one buffer. Where eager training would create a new
``param.grad``, a backward binds it to the sink; from then on both are the same memory, and nothing
is copied. A gradient with other references, such as a view of a flat buffer, stays where it is, and
is copied to the sink and back around each backward.

Anything that a caller does with ``param.grad`` between two backwards generally changes the number
of tensors on the buffer. So one comparison shows whether all gradients are still bound.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, is_not, itemgetter

import torch
from torch import nn

from chunkgraph.engine.layout import dense_strides, memory_of, span
from chunkgraph.errors import ReplayMismatchError

__all__ = ["Binding", "GradMemory", "use_count"]

_ALIGNMENT_BYTES = 512  # of the CUDA allocator: kernels see the alignment that eager memory has


use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Return the number of tensors on a storage, by its address."""

_Reference = Callable[[], torch.Tensor | None]
"""A weak reference to a tensor."""


def _nothing() -> None:
    """Return None, as a reference to no tensor."""


_grad = attrgetter("grad")
_NO_PARAMETER = nn.Parameter(torch.empty(0))


@dataclass
class Binding:
    """The result of `GradMemory.bind`.

    Attributes:
        others: parameters whose gradient has other references or another layout, each with its
            gradient and its sink. The gradient stays, and is copied to the sink and back around
            each backward.
        bound: the other parameters, whose gradient is the sink.
        references: weak references to the gradients of ``bound``.
        is_fresh: whether none of the parameters had a gradient; False after the next backward.
        generation: the memory's generation at that time.
    """

    others: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]
    bound: Sequence[nn.Parameter]
    references: Sequence[_Reference]
    is_fresh: bool
    generation: int = -1

    def __post_init__(self) -> None:
        self.first = self.bound[0] if self.bound else _NO_PARAMETER
        # Held, since reading an attribute is slow while nothing in Python refers to its tensor.
        self.grad_of_first = self.first.grad

    def is_current(self) -> bool:
        """Return whether the first bound parameter and all others still have these gradients."""
        return self.first.grad is self.grad_of_first and (
            not self.others or all(p.grad is grad for p, grad, _ in self.others)
        )

    def num_replaced(self) -> int:
        """Return how many of the bound parameters have another gradient now, or none."""
        return sum(map(is_not, map(_grad, self.bound), [bound() for bound in self.references]))

    def before_backward(self) -> None:
        """Copy the gradients of ``others`` to their sinks."""
        for _, grad, sink in self.others:
            sink.copy_(grad)

    def after_backward(self) -> None:
        """Copy the sums of ``others`` from their sinks back to the gradients."""
        with torch.no_grad():
            for _, grad, sink in self.others:
                grad.copy_(sink)


class GradMemory:
    """The sinks of one rank's parameters that have no ``main_grad``.

    Args:
        parameters: each parameter once; all on one device.

    Attributes:
        generation: increases whenever `bind` finds a gradient changed from outside.
        address: address of the sinks' storage object, for `use_count`.
        num_expected: the use count of the storage as long as no gradient was bound, dropped,
            replaced or viewed since `bind`. Does not reveal a gradient that was dropped but is
            still referenced.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if not hasattr(p, "main_grad")]
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        offsets, end = [], 0
        for p in self._parameters:
            offsets.append(end)
            size = span(p.shape, dense_strides(p)) * _dtype(p).itemsize
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        device = self._parameters[0].device if self._parameters else None
        self._buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self._storage = self._buffer.untyped_storage()
        self.address = self._storage._cdata
        self._sinks = [
            torch.empty(0, dtype=_dtype(p), device=p.device).set_(
                self._storage, offset // _dtype(p).itemsize, p.shape, dense_strides(p)
            )
            for p, offset in zip(self._parameters, offsets, strict=True)
        ]
        # The last tensor that `grad` was bound to. Weak, so that other references can be counted.
        self._bound: list[_Reference] = [_nothing] * len(self._parameters)
        self.generation = 0
        self._num_own = self._num_tensors()
        self.num_expected = self._num_own

    @property
    def num_bytes(self) -> int:
        """Return the size of the sinks, present or not."""
        return self._buffer.numel()

    def set_aside(self) -> None:
        """Give the memory of the sinks back until `restore`; until then nobody may use them."""
        self._storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory of the sinks again."""
        if self._storage.nbytes() < self.num_bytes:
            self._storage.resize_(self.num_bytes)
            self._buffer.zero_()

    def sink(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the memory that graphs add the gradient of ``parameter`` to."""
        return self._sinks[self._index[id(parameter)]]

    def has_changed(self) -> bool:
        """Return whether a gradient was bound, dropped, replaced or viewed since `bind`."""
        return use_count(self.address) != self.num_expected

    def bind(self, parameters: Sequence[nn.Parameter]) -> Binding:
        """Bind the gradients of ``parameters`` to their sinks, before a backward adds to them.

        Args:
            parameters: the parameters that get gradients in the backward.

        Raises:
            ReplayMismatchError: views of a gradient that was dropped are still in use, two
                gradients share memory, or one is sparse.
        """
        if self.has_changed():
            self.generation += 1
        indices = [*map(self._index.__getitem__, map(id, parameters))]
        unbound = self._unbound(parameters, indices)
        self._leave_to_keepers(unbound)
        self._refuse_shared(unbound)
        are_none = all(self._parameters[i].grad is None for i in unbound)
        is_filled = are_none and len(unbound) == len(self._sinks) and self._fill_all()
        others: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        num_fresh = 0
        for index in unbound:
            parameter, sink = self._parameters[index], self._sinks[index]
            if parameter.grad is None:
                # The only value x for which x + g equals g in every bit, even if g is -0.0.
                if not is_filled:
                    sink.fill_(-0.0)
                num_fresh += 1
            elif (
                parameter.grad.requires_grad  # of backward(create_graph=True)
                or _references(parameter) != _SOLE_REFERENCES
                or parameter.grad.stride() != sink.stride()
            ):
                others.append((parameter, parameter.grad, sink))
                continue
            else:
                sink.copy_(parameter.grad)
            bound = sink.detach()
            parameter.grad = bound
            self._bound[index] = weakref.ref(bound)
        self.num_expected = self._num_tensors()
        kept = {id(parameter) for parameter, _, _ in others}
        on_sinks = [p for p in parameters if id(p) not in kept] if kept else parameters
        references = [self._bound[i] for i in indices if id(self._parameters[i]) not in kept]
        is_fresh = num_fresh == len(parameters)
        return Binding(others, on_sinks, references, is_fresh, self.generation)

    def _refuse_shared(self, indices: Sequence[int]) -> None:
        """Refuse gradients with memory of each other or of the sinks."""
        grads = [self._parameters[i].grad for i in indices]
        tensors = [self._buffer, *(grad for grad in grads if grad is not None)]
        regions = [(r.start, r.end, t) for t in tensors if (r := memory_of(t)) is not None]
        regions.sort(key=itemgetter(0))
        if any(a[1] > b[0] and _overlap(a[2], b[2]) for a, b in pairwise(regions)):
            raise ReplayMismatchError(
                "Two parameters have gradients in the same memory, and a backward would lose one "
                "of the sums.\n"
                "  To do: give each parameter its own .grad (`p.grad = p.grad.clone()`)."
            )

    def _fill_all(self) -> bool:
        """Fill all sinks with -0.0 at once, if they have one dtype."""
        dtype, *others = {sink.dtype for sink in self._sinks}
        if not others:
            self._buffer.view(dtype).fill_(-0.0)
        return not others

    def _unbound(self, parameters: Sequence[nn.Parameter], indices: Sequence[int]) -> list[int]:
        """Return the indices of parameters whose gradient is not the sink."""
        bound = self._bound
        return [
            i
            for i, grad in zip(indices, map(_grad, parameters), strict=True)
            if grad is None or (grad is not bound[i]() and not self._is_alias(i, grad))
        ]

    def _is_alias(self, index: int, grad: torch.Tensor) -> bool:
        """Return whether ``grad`` is another tensor on the sink, and adopt it if so.

        Raises:
            ReplayMismatchError: the gradient is not dense.
        """
        if grad.layout is not torch.strided:
            raise ReplayMismatchError(
                f"The gradient of a parameter of shape {tuple(grad.shape)} is {grad.layout}, but "
                "replays add dense ones.\n"
                "  To do: clear it before the step, or make it dense (`p.grad.to_dense()`)."
            )
        sink = self._sinks[index]
        is_alias = grad.data_ptr() == sink.data_ptr() and grad.stride() == sink.stride()
        if is_alias and grad.numel():
            self._bound[index] = weakref.ref(grad)
        return is_alias

    def _leave_to_keepers(self, indices: Sequence[int]) -> None:
        """Move dropped gradients that are still referenced to their own memory."""
        was_bound = False
        for index in indices:
            last, self._bound[index] = self._bound[index], _nothing
            was_bound |= last is not _nothing
            kept = last()
            if kept is not None:
                kept.data = kept.clone()
        if not was_bound:
            return
        num_bound = sum(bound() is not None for bound in self._bound)
        if self._num_tensors() > self._num_own + num_bound:
            raise ReplayMismatchError(
                "A .grad was dropped or replaced, but views of its memory are still in use (from "
                "detach(), view() or indexing); replays would overwrite them.\n"
                "  To do: keep copies (`p.grad.clone()`) instead of views, or clear gradients in "
                "place (`zero_grad(set_to_none=False)`)."
            )

    def _num_tensors(self) -> int:
        return use_count(self.address)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors, whose first and last elements enclose each other's, share any."""
    if one.dtype != other.dtype:
        return True
    begin = min(one.data_ptr(), other.data_ptr())
    offsets = [(t.data_ptr() - begin) // t.itemsize for t in (one, other)]
    sizes = [
        offset + span(t.shape, t.stride()) for offset, t in zip(offsets, (one, other), strict=True)
    ]
    marks = torch.zeros(max(sizes), dtype=torch.int8)
    for offset, t in zip(offsets, (one, other), strict=True):
        marks.as_strided(t.shape, t.stride(), offset).add_(1)
    return bool((marks > 1).any())


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype in which ``parameter.grad`` accumulates; FSDP2 chooses a wider one."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _references(parameter: nn.Parameter) -> tuple[int, int]:
    grad = parameter.grad
    assert grad is not None
    return sys.getrefcount(grad), use_count(grad.untyped_storage()._cdata)


def _sole_references() -> tuple[int, int]:
    parameter = nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    return _references(parameter)


_SOLE_REFERENCES = _sole_references()
