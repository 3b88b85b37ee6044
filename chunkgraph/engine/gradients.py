"""Gradient sinks: where replayed backwards add gradients.

A parameter's sink is ``param.main_grad`` if its owner (Megatron's DDP) created one, else memory of
the engine that becomes ``param.grad`` (`GradMemory`). During the capture of a backward, a hook
takes every gradient out of ``leaf.grad`` as soon as autograd has stored it there, adds it to the
sink and drops it, so that few weight gradients are alive at once. Activation recomputation runs
backwards inside the backward; the same hooks take their gradients.

Between steps a caller may do anything with ``param.grad``; the first backward of a step binds it to
its sink again. Inside a step only a wrapper that replaces all gradients (FSDP) is noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from chunkgraph.engine.capture.accumulate import Accumulation, collecting, new_accumulate, receiver
from chunkgraph.engine.chunk import GradientMarker
from chunkgraph.engine.layout import dense_strides, span
from chunkgraph.errors import ReplayMismatchError

_ALIGNMENT_BYTES = 512  # of the CUDA allocator: kernels see the alignment that eager memory has

_NO_PARAMETER = nn.Parameter(torch.empty(0))

use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Return the number of tensors on a storage, by its address."""


def _num_tensors_on_new_storage() -> int:
    tensor = torch.zeros(1, device="cpu")
    return use_count(tensor.untyped_storage()._cdata)


NUM_SOLE = _num_tensors_on_new_storage()


def _nothing() -> None:
    """Return None, as a weak reference to no tensor."""


class GradMemory:
    """The sinks of one rank's parameters that have no ``main_grad``, all in one buffer.

    Args:
        parameters: each parameter once; all on one device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if not hasattr(p, "main_grad")]
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        # FSDP2 chooses a wider dtype for gradients.
        dtypes = [getattr(p, "grad_dtype", None) or p.dtype for p in self._parameters]
        offsets, end = [], 0
        for p, dtype in zip(self._parameters, dtypes, strict=True):
            offsets.append(end)
            size = span(p.shape, dense_strides(p)) * dtype.itemsize
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        device = self._parameters[0].device if self._parameters else None
        self._buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self._storage = self._buffer.untyped_storage()
        self._sinks = [
            torch.empty(0, dtype=dtype, device=p.device).set_(
                self._storage, offset // dtype.itemsize, p.shape, dense_strides(p)
            )
            for p, dtype, offset in zip(self._parameters, dtypes, offsets, strict=True)
        ]
        self._addresses = [sink.data_ptr() for sink in self._sinks]
        # The last tensor that `grad` was bound to, while the caller or torch still has it.
        self._bound: list[Callable[[], torch.Tensor | None]] = [_nothing] * len(self._parameters)
        self._num_own = use_count(self._storage._cdata)
        self._shared: list[tuple[int, torch.Tensor]] = []

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
            self._addresses = [sink.data_ptr() for sink in self._sinks]

    def sink(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the memory that graphs add the gradient of ``parameter`` to."""
        return self._sinks[self._index[id(parameter)]]

    @torch.no_grad()
    def bind(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let ``grad`` of each parameter be its sink, before a backward adds to it.

        A new ``grad`` begins with -0.0, the only x for which x + g equals g in every bit. One that
        the caller has put there moves to the sink; one that shares memory, as in a flat buffer, is
        set aside until `return_shared`. Tensors that were bound and are now kept elsewhere move to
        memory of their own.

        Raises:
            ReplayMismatchError: views of a gradient that was dropped are still in use, or one is
                sparse, requires grad, or is that of another parameter.
        """
        bound, addresses = self._bound, self._addresses
        unbound = []
        for p in parameters:
            i, grad = self._index[id(p)], p.grad
            if grad is None or grad is not bound[i]() or grad.data_ptr() != addresses[i]:
                unbound.append(i)
        self._leave_to_keepers(unbound)
        missing = [i for i in unbound if self._parameters[i].grad is None]
        for index in unbound:
            grad, sink = self._parameters[index].grad, self._sinks[index]
            if grad is None:
                grad = self._parameters[index].grad = sink.detach()
            else:
                self._refuse_unusable(grad)
                sink.copy_(grad)
                if use_count(grad.untyped_storage()._cdata) == NUM_SOLE:
                    grad.data = sink
                else:
                    self._shared.append((index, grad))
                    grad = self._parameters[index].grad = sink.detach()
            self._bound[index] = weakref.ref(grad)
        dtypes = {sink.dtype for sink in self._sinks}
        if len(missing) == len(self._sinks) and len(dtypes) == 1:  # at once
            self._buffer.view(dtypes.pop()).fill_(-0.0)
            return
        for index in missing:
            self._sinks[index].fill_(-0.0)

    @torch.no_grad()
    def return_shared(self) -> None:
        """Put gradients that were set aside back, with the sums of the step."""
        shared, self._shared = self._shared, []
        for index, grad in shared:
            grad.copy_(self._sinks[index])
            self._parameters[index].grad = grad
            self._bound[index] = _nothing

    def _refuse_unusable(self, grad: torch.Tensor) -> None:
        """Refuse a gradient of the caller that cannot move to a sink.

        Raises:
            ReplayMismatchError: it is sparse, requires grad, or is that of another parameter.
        """
        if grad.layout is not torch.strided:
            problem = f"is {grad.layout}"
        elif grad.requires_grad:
            problem = "requires grad"
        elif grad.untyped_storage()._cdata == self._storage._cdata or any(
            grad.data_ptr() == other.data_ptr() != 0 for _, other in self._shared
        ):
            problem = "is that of another parameter"
        else:
            return
        raise ReplayMismatchError(
            f"The .grad of a parameter of shape {tuple(grad.shape)} {problem}, but replays keep a "
            "dense gradient for each parameter.\n"
            "  To do: clear it before the step (`p.grad = None`), or give it its own memory "
            "(`p.grad = p.grad.detach().to_dense().clone()`)."
        )

    def _leave_to_keepers(self, indices: Sequence[int]) -> None:
        """Move gradients that are no longer bound, but still referenced, to their own memory."""
        was_bound = False
        for index in indices:
            last, self._bound[index] = self._bound[index], _nothing
            was_bound |= last is not _nothing
            kept = last()
            if kept is not None:
                kept.data = kept.clone()
        if was_bound and self._has_views():
            raise ReplayMismatchError(
                "A .grad was dropped or replaced, but views of its memory are still in use (from "
                "detach(), view() or indexing); replays would overwrite them.\n"
                "  To do: keep copies (`p.grad.clone()`) instead of views, or clear gradients in "
                "place (`zero_grad(set_to_none=False)`)."
            )

    def _has_views(self) -> bool:
        """Return whether tensors other than those that are bound lie in the buffer."""
        num_bound = sum(bound() is not None for bound in self._bound)
        return use_count(self._storage._cdata) > self._num_own + num_bound

    def release(self) -> None:
        """Leave each gradient to the caller in its own memory, once no graph adds to it.

        With views of them in use, all stay where they are.
        """
        grads = [bound() for bound in self._bound]
        if not self._has_views():
            for grad in grads:
                if grad is not None:
                    grad.data = grad.clone()
            self._bound = [_nothing] * len(grads)  # the sinks of other chunks release it too


class GradientSinks:
    """The fixed gradient buffers of one chunk's parameters.

    Args:
        parameters: the chunk's trainable parameters.
        memory: the gradient memory of the rank, since chunks may share parameters; None: create
            memory for these parameters alone.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], memory: GradMemory | None = None
    ) -> None:
        self.parameters = tuple(parameters)
        self._memory = GradMemory(self.parameters) if memory is None else memory
        self._has_main_grad = [hasattr(p, "main_grad") for p in self.parameters]
        self._are_all_main = all(self._has_main_grad)
        self._sinks: list[torch.Tensor] = [
            p.main_grad if has else self._memory.sink(p)  # type: ignore[attr-defined]
            for p, has in zip(self.parameters, self._has_main_grad, strict=True)
        ]
        self._accumulate = new_accumulate(self._sinks, [p.dtype for p in self.parameters])
        self._trained: dict[tuple[int, ...], tuple[int, ...]] = {}
        # What the last `bind` of this step was for. Who clears gradients clears the first one too.
        self._bound_for: tuple[int, ...] | None = None
        self._first = _NO_PARAMETER
        self._first_grad: torch.Tensor | None = None

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return the sinks, one for each parameter."""
        return tuple(self._sinks)

    def release(self) -> None:
        """See `GradMemory.release`."""
        self._memory.release()

    def accumulation(self, marker: GradientMarker | None = None) -> Accumulation:
        """Return what adds the gradients of one backward to the sinks."""
        return Accumulation(self._accumulate, self._sinks, marker)

    @contextmanager
    def accumulating(
        self, leaves: Sequence[nn.Parameter], marker: GradientMarker | None = None
    ) -> Iterator[Accumulation]:
        """Add each gradient that autograd computes for a leaf in this block to its sink.

        ``leaves`` stand for the parameters, in order (see `ParameterAliases`).

        Yields:
            The gradients; call its ``finish`` after the backward.
        """
        sums = self.accumulation(marker)
        with collecting(leaves, receiver(leaves, sums)):
            yield sums

    @contextmanager
    def summing(
        self, leaves: Sequence[nn.Parameter], marker: GradientMarker
    ) -> Iterator[tuple[Accumulation, dict[int, torch.Tensor]]]:
        """Sum the gradients of an eager pass in this block, as `accumulating` does.

        Gradients go to ``main_grad`` where there is one, and else to memory of their own: the sinks
        need none before the capture.

        Yields:
            The gradients, and the sum of each parameter by its index.
        """
        totals = _Totals(self._sinks)
        for index, has_main_grad in enumerate(self._has_main_grad):
            if has_main_grad:
                totals[index] = self._sinks[index]
        sums = Accumulation(self._accumulate, totals, marker)
        with collecting(leaves, receiver(leaves, sums)):
            yield sums, totals

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Let passes of this block add to cleared sinks; restore every ``main_grad`` on exit.

        Sums that are not zero when a session begins are kept on the host, since the session needs
        the device's memory for graphs.
        """
        main_grads = [s for s, has in zip(self._sinks, self._has_main_grad, strict=True) if has]
        kept = [(s, s.to("cpu", copy=True)) for s in main_grads] if _any_bit(main_grads) else []
        self.clear()
        try:
            yield
        finally:
            self.clear()
            with torch.no_grad():
                for sink, value in kept:
                    sink.copy_(value)

    def clear(self) -> None:
        """Give each sink the value that a step's first gradient is added to."""
        with torch.no_grad():
            for sink, has_main_grad in zip(self._sinks, self._has_main_grad, strict=True):
                if has_main_grad:
                    sink.zero_()
                elif sink.untyped_storage().nbytes():  # before the capture it has no memory
                    sink.fill_(-0.0)

    def interned(self, trained: tuple[int, ...]) -> tuple[int, ...]:
        """Return one object for all equal tuples; `bind_grads` compares by identity."""
        return self._trained.setdefault(trained, trained)

    def begin_step(self) -> None:
        """Let the first backward look at every ``param.grad``."""
        # No reference to a gradient, so that `GradMemory` can tell what the caller keeps.
        self._bound_for = self._first_grad = None

    def end_step(self) -> None:
        """Put back what `bind_grads` has set aside."""
        self._memory.return_shared()

    def bind_grads(self, trained: tuple[int, ...]) -> None:
        """Bind ``param.grad`` to the sinks, before a replay adds to them.

        Args:
            trained: indices of the parameters that get gradients, from `interned`.

        Raises:
            ReplayMismatchError: a gradient cannot be bound; see `GradMemory.bind`.
        """
        if self._are_all_main:
            return
        if trained is self._bound_for and self._first.grad is self._first_grad:
            return
        # A wrapper may set and remove main_grad around each backward (Megatron-FSDP).
        own = [self.parameters[i] for i in trained if not self._has_main_grad[i]]
        self._bound_for = self._first_grad = None
        self._memory.bind(own)
        self._bound_for, self._first = trained, own[0] if own else _NO_PARAMETER
        self._first_grad = self._first.grad


class _Totals(dict[int, torch.Tensor]):
    """Sums by the index of their parameter, created in the layout of ``sinks`` when first used."""

    def __init__(self, sinks: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._layouts = sinks

    def __missing__(self, index: int) -> torch.Tensor:
        total = self[index] = torch.full_like(self._layouts[index], -0.0)
        return total


def _any_bit(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any bit is set, so that -0.0 is not zero. Waits for the device."""
    flags = [t.detach().reshape(-1).view(torch.uint8).any() for t in tensors if t.numel()]
    return bool(flags) and bool(torch.stack(flags).any())
