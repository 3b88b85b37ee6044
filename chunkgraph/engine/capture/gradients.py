"""Accumulate gradients inside the backward graph, each as soon as it is ready.

A parameter's sink is ``param.main_grad`` if its owner (Megatron's DDP) created one, else memory of
the engine that becomes ``param.grad`` (`chunkgraph.engine.capture.grad_memory`). During the capture
of a backward, a hook takes every gradient out of ``leaf.grad`` as soon as autograd has stored it
there, adds it to the sink and drops it, so that few weight gradients are alive at once.
Activation recomputation runs backwards inside the backward; the same hooks take their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from chunkgraph.engine.capture.accumulate import Accumulate, Accumulation, new_accumulate
from chunkgraph.engine.capture.grad_memory import GradMemory
from chunkgraph.engine.chunk import GradientMarker

__all__ = ["GradientSinks"]

_Hook = Callable[[torch.Tensor], None]
_NO_PARAMETER = nn.Parameter(torch.empty(0))


class GradientSinks:
    """The fixed gradient buffers of one chunk's parameters.

    Args:
        parameters: the chunk's trainable parameters.
        label: the chunk's name in errors.
        memory: the gradient memory of the rank, since chunks may share parameters; None: create
            memory for these parameters alone.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        label: str,
        memory: GradMemory | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self._label = label
        self._memory = GradMemory(self.parameters) if memory is None else memory
        self._has_main_grad = [hasattr(p, "main_grad") for p in self.parameters]
        self._are_all_main = all(self._has_main_grad)
        self._sinks: list[torch.Tensor] = [
            p.main_grad if has else self._memory.sink(p)  # type: ignore[attr-defined]
            for p, has in zip(self.parameters, self._has_main_grad, strict=True)
        ]
        self._accumulate = new_accumulate(self._sinks, [p.dtype for p in self.parameters])
        self._trained: dict[tuple[int, ...], tuple[int, ...]] = {}
        # What the last `bind` found, and for which parameters. A caller that clears gradients
        # inside a step clears the first one too.
        self._bound_for: tuple[int, ...] | None = None
        self._left: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._first = _NO_PARAMETER
        self._first_grad: torch.Tensor | None = None

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return the sinks, one for each parameter."""
        return tuple(self._sinks)

    def accumulation(self, marker: GradientMarker | None = None) -> Accumulation:
        """Return what adds the gradients of one backward to the sinks."""
        return Accumulation(self._accumulate, self._sinks, marker)

    @contextmanager
    def accumulating(
        self, leaves: Sequence[nn.Parameter], marker: GradientMarker | None = None
    ) -> Iterator[Accumulation]:
        """Add each gradient that autograd computes for a leaf in this block to its sink.

        ``leaves`` stand for the parameters, in order (see `ParameterAliases`). Inside, their
        ``grad`` is None except while a hook takes a gradient; on exit it is restored.

        Yields:
            The gradients; call its ``finish`` after the backward.
        """
        sums = self.accumulation(marker)
        with self._passing(leaves, sums):
            yield sums

    @contextmanager
    def _passing(self, leaves: Sequence[nn.Parameter], sums: Accumulation) -> Iterator[None]:
        def receive(index: int, gradient: torch.Tensor) -> None:
            if getattr(leaves[index], "grad_added_to_main_grad", False):
                sums.note(index)  # by a dummy gradient
            else:
                sums.add(index, gradient)

        with self.collecting(leaves, receive):
            yield

    @contextmanager
    def collecting(
        self, leaves: Sequence[nn.Parameter], take: Callable[[int, torch.Tensor], None]
    ) -> Iterator[None]:
        """Pass each gradient that autograd computes for a leaf in this block to ``take``."""

        def hook(index: int) -> _Hook:
            def receive(leaf: torch.Tensor) -> None:
                gradient, leaf.grad = leaf.grad, None
                if gradient is not None:  # a custom function may return None
                    take(index, gradient)

            return receive

        with _taking_gradients(leaves, [hook(i) for i in range(len(leaves))]):
            yield

    @contextmanager
    def summing(
        self, leaves: Sequence[nn.Parameter], marker: GradientMarker
    ) -> Iterator[tuple[Accumulation, Callable[[], list[torch.Tensor | None]]]]:
        """Sum the gradients of an eager pass in this block, as `accumulating` does.

        Gradients go to ``main_grad`` where there is one, and else to memory of their own: the sinks
        need none before the capture.

        Yields:
            The gradients, and a function that returns the sum of each parameter, or None.
        """
        totals = [
            sink if has_main_grad else _Total()
            for sink, has_main_grad in zip(self._sinks, self._has_main_grad, strict=True)
        ]
        sums = Accumulation(_adding(self._accumulate), totals, marker)
        with self._passing(leaves, sums):
            yield sums, lambda: [t.value if isinstance(t, _Total) else t for t in totals]

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Let passes of this block add to cleared sinks; restore every ``main_grad`` on exit.

        They are zero when a step begins. Others are kept on the host, since a session needs the
        device's memory for graphs.
        """
        main_grads = [s for s, has in zip(self._sinks, self._has_main_grad, strict=True) if has]
        kept = [(s, s.to("cpu", copy=True)) for s in main_grads] if _any_bit(main_grads) else []
        self.clear()
        try:
            yield
        finally:
            with torch.no_grad():
                for sink in () if kept else main_grads:
                    sink.zero_()
                for sink, value in kept:
                    sink.copy_(value)

    def clear(self) -> None:
        """Give each sink the value that a step's first gradient is added to."""
        with torch.no_grad():
            for sink, has_main_grad in zip(self._sinks, self._has_main_grad, strict=True):
                if has_main_grad:
                    sink.zero_()
                elif sink.untyped_storage().nbytes():  # before the capture it has no memory
                    # Of all x, only -0.0 + g has the bits of g for every g.
                    sink.fill_(-0.0)

    def interned(self, trained: tuple[int, ...]) -> tuple[int, ...]:
        """Return one object for all equal tuples; `before_backward` compares by identity."""
        return self._trained.setdefault(trained, trained)

    def begin_step(self) -> None:
        """Forget what the last step bound."""
        self._unbind()

    def before_backward(self, trained: tuple[int, ...]) -> None:
        """Bind ``param.grad`` to the sinks, before a replay adds to them.

        Only the first backward of a step looks at every parameter.

        Args:
            trained: indices of the parameters that get gradients, from `interned`.

        Raises:
            ReplayMismatchError: a gradient cannot be bound; see `GradMemory.bind`.
        """
        if self._are_all_main:
            return
        if trained is not self._bound_for or self._first.grad is not self._first_grad:
            # A wrapper may set and remove main_grad around each backward (Megatron-FSDP).
            own = [self.parameters[i] for i in trained if not self._has_main_grad[i]]
            self._unbind()
            with torch.no_grad():
                self._left = self._memory.bind(own)
            self._first = own[0] if own else _NO_PARAMETER
            self._first_grad = self._first.grad
            self._bound_for = trained
        grads, sinks = self._left
        if grads:
            with torch.no_grad():
                torch._foreach_copy_(sinks, grads)

    def _unbind(self) -> None:
        """Refer to no gradient, so that `GradMemory` can tell what the caller keeps."""
        self._bound_for, self._left, self._first_grad = None, ([], []), None

    def after_backward(self) -> None:
        """Copy the sums of gradients that are not bound from their sinks back to them."""
        grads, sinks = self._left
        if grads:
            with torch.no_grad():
                torch._foreach_copy_(grads, sinks)


class _Total:
    """The sum of one parameter's gradients."""

    value: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        if self.value is not None:
            self.value += gradient
        else:  # a copy, so that the gradient is freed when a capture frees it
            self.value = gradient.detach().clone()


def _adding(accumulate: Accumulate) -> Callable[..., None]:
    """Return an `Accumulate` whose sinks may be totals."""

    def add(sinks: Sequence[torch.Tensor | _Total], gradients: Sequence[torch.Tensor]) -> None:
        for sink, gradient in zip(sinks, gradients, strict=True):
            if isinstance(sink, _Total):
                sink.add(gradient)
            else:
                accumulate([sink], [gradient])

    return add


def _any_bit(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any bit is set, so that -0.0 is not zero. Waits for the device."""
    flags = [t.detach().reshape(-1).view(torch.uint8).any() for t in tensors if t.numel()]
    return bool(flags) and bool(torch.stack(flags).any())


@contextmanager
def _taking_gradients(leaves: Sequence[nn.Parameter], hooks: Sequence[_Hook]) -> Iterator[None]:
    """Call each leaf's hook when ``leaf.grad`` holds one new gradient; restore ``grad`` on exit.

    Autograd stores a new gradient without a copy only if ``grad`` is None.
    """
    grads = [leaf.grad for leaf in leaves]
    handles = [
        leaf.register_post_accumulate_grad_hook(hook)
        for leaf, hook in zip(leaves, hooks, strict=True)
    ]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for handle in handles:
            handle.remove()
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
