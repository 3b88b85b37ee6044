"""``param.grad`` of parameters without a ``main_grad``, and the memory that graphs add to.

Graphs add to fixed memory, the *sinks*, all in one buffer. Where eager training would create a new
``param.grad``, a backward binds it to the sink; from then on both are the same memory, and nothing
is copied. A gradient that the caller has moves there. If it shares memory, as a view of a flat
buffer does, it stays where it is, and is copied to the sink and back around each backward.

Between steps a caller may do anything with ``param.grad``; the first backward of a step binds it
again. Inside a step only a caller who clears all gradients is noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch import nn

from chunkgraph.engine.layout import dense_strides, span
from chunkgraph.errors import ReplayMismatchError

__all__ = ["GradMemory", "use_count"]

_ALIGNMENT_BYTES = 512  # of the CUDA allocator: kernels see the alignment that eager memory has


use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Return the number of tensors on a storage, by its address."""

_Reference = Callable[[], torch.Tensor | None]
"""A weak reference to a tensor."""


def _nothing() -> None:
    """Return None, as a reference to no tensor."""


_grad = attrgetter("grad")


class GradMemory:
    """The sinks of one rank's parameters that have no ``main_grad``.

    Args:
        parameters: each parameter once; all on one device.
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
        self._address = self._storage._cdata
        self._sinks = [
            torch.empty(0, dtype=_dtype(p), device=p.device).set_(
                self._storage, offset // _dtype(p).itemsize, p.shape, dense_strides(p)
            )
            for p, offset in zip(self._parameters, offsets, strict=True)
        ]
        # The last tensor that `grad` was bound to, while the caller or torch still has it.
        self._bound: list[_Reference] = [_nothing] * len(self._parameters)
        self._num_own = use_count(self._address)

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

    def bind(
        self, parameters: Sequence[nn.Parameter]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Bind the gradients of ``parameters`` to their sinks, before a backward adds to them.

        Args:
            parameters: the parameters that get gradients in the backward.

        Returns:
            The gradients that stay in memory of the caller, and their sinks. The caller copies them
            to the sinks before each backward, and back after it.

        Raises:
            ReplayMismatchError: views of a gradient that was dropped are still in use, two
                parameters have one gradient, or one is sparse.
        """
        indices = [*map(self._index.__getitem__, map(id, parameters))]
        unbound = self._unbound(parameters, indices)
        self._leave_to_keepers(unbound)
        missing = [i for i in unbound if self._parameters[i].grad is None]
        if len(missing) < len(unbound):
            _refuse_shared([grad for grad in map(_grad, parameters) if grad is not None])
        self._fill(missing)
        grads, sinks = [], []
        for index in unbound:
            parameter, sink = self._parameters[index], self._sinks[index]
            grad = parameter.grad
            if grad is None:
                grad = parameter.grad = sink.detach()
            elif (
                not grad.requires_grad  # unlike those of backward(create_graph=True)
                and grad.stride() == sink.stride()
                and use_count(grad.untyped_storage()._cdata) == _NUM_SOLE
            ):
                sink.copy_(grad)
                grad.data = sink
            else:
                grads.append(grad)
                sinks.append(sink)
                continue
            self._bound[index] = weakref.ref(grad)
        return grads, sinks

    def _fill(self, indices: Sequence[int]) -> None:
        """Fill sinks with -0.0, the only x for which x + g equals g in every bit."""
        dtypes = {sink.dtype for sink in self._sinks}
        if len(indices) == len(self._sinks) and len(dtypes) == 1:  # at once
            self._buffer.view(dtypes.pop()).fill_(-0.0)
            return
        for index in indices:
            self._sinks[index].fill_(-0.0)

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
        if use_count(self._address) > self._num_own + num_bound:
            raise ReplayMismatchError(
                "A .grad was dropped or replaced, but views of its memory are still in use (from "
                "detach(), view() or indexing); replays would overwrite them.\n"
                "  To do: keep copies (`p.grad.clone()`) instead of views, or clear gradients in "
                "place (`zero_grad(set_to_none=False)`)."
            )


def _refuse_shared(grads: Sequence[torch.Tensor]) -> None:
    addresses = [grad.data_ptr() for grad in grads if grad.numel()]
    if len(set(addresses)) < len(addresses):
        raise ReplayMismatchError(
            "Two parameters have gradients in the same memory, and a backward would lose one of "
            "the sums.\n"
            "  To do: give each parameter its own .grad (`p.grad = p.grad.clone()`)."
        )


def _num_tensors_on_new_storage() -> int:
    tensor = torch.zeros(1, device="cpu")
    return use_count(tensor.untyped_storage()._cdata)


_NUM_SOLE = _num_tensors_on_new_storage()


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype in which ``parameter.grad`` accumulates; FSDP2 chooses a wider one."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
