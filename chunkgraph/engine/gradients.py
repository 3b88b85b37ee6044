"""Gradients: accumulated inside the backward graph, each as soon as it is ready.

A parameter's sink is ``param.main_grad`` where its owner (Megatron's DDP) made one, else a fixed
buffer that the engine binds to ``param.grad`` at a chunk's first backward of a step, with what was
there by then. During the capture of a
backward a hook takes every gradient out of ``leaf.grad`` as soon as autograd has put it there, adds
it to the sink and drops it, so that no two weight gradients are alive at once. Activation
recomputation runs backwards inside the backward; their gradients arrive at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from chunkgraph.engine.accumulate import new_accumulate
from chunkgraph.engine.chunk import GradientMarker
from chunkgraph.errors import ReplayMismatchError

__all__ = ["GradientSinks"]

_Hook = Callable[[torch.Tensor], None]


class GradientSinks:
    """The fixed gradient buffers of one chunk's parameters.

    Args:
        parameters: the chunk's trainable parameters.
        label: names the chunk in errors.
        made: the buffers made so far for the rank's parameters, since chunks may share one;
            those made here are added.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        label: str,
        made: dict[nn.Parameter, torch.Tensor] | None = None,
    ) -> None:
        made = {} if made is None else made
        self.parameters = tuple(parameters)
        self._label = label
        self._sinks: list[torch.Tensor] = []
        self._own: list[int] = []
        for index, parameter in enumerate(self.parameters):
            main_grad = getattr(parameter, "main_grad", None)
            if main_grad is None:
                self._own.append(index)
                main_grad = made.get(parameter)
                if main_grad is None:
                    main_grad = made[parameter] = torch.empty_like(parameter, requires_grad=False)
            self._sinks.append(main_grad)
        self._received = [False] * len(self.parameters)
        self._accumulate = new_accumulate(self._sinks, [p.dtype for p in self.parameters])
        self._addresses = self._current_addresses()
        self.is_bound = not self._own

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers that gradients are added to, one for each parameter."""
        return tuple(self._sinks)

    @contextmanager
    def accumulating(
        self, leaves: Sequence[nn.Parameter], marker: GradientMarker | None = None
    ) -> Iterator[None]:
        """Inside, a gradient that autograd computes for a leaf is added to its parameter's sink.

        ``leaves`` stand for the parameters, in order (see `ParameterAliases`); their ``grad`` is
        None inside but for the moment when a gradient arrives, and as before afterwards.
        """
        with _taking_gradients(leaves, [self._hook(i, marker) for i in range(len(leaves))]):
            yield

    @contextmanager
    def discarding(self, leaves: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, gradients go nowhere (capture warmup), one at a time.

        Layers that accumulate in their weight-gradient GEMM write to a throw-away buffer as large
        as the largest parameter, in the place of ``main_grad``.
        """
        largest: dict[torch.dtype, int] = {}
        for sink in self._sinks:
            largest[sink.dtype] = max(largest.get(sink.dtype, 0), sink.numel())
        dumps = {
            dtype: torch.empty(size, dtype=dtype, device=self._sinks[0].device)
            for dtype, size in largest.items()
        }
        kept = [getattr(leaf, "main_grad", None) for leaf in leaves]
        try:
            for leaf, main_grad in zip(leaves, kept, strict=True):
                if main_grad is not None:
                    dump = dumps[main_grad.dtype][: main_grad.numel()]
                    leaf.main_grad = dump.view(main_grad.shape)  # type: ignore[attr-defined]
            with _taking_gradients(leaves, [_discard] * len(leaves)):
                yield
        finally:
            for leaf, main_grad in zip(leaves, kept, strict=True):
                if main_grad is not None:
                    leaf.main_grad = main_grad  # type: ignore[attr-defined]

    def begin_step(self) -> None:
        """Check addresses. Once a step, not per microbatch.

        Raises:
            ReplayMismatchError: a parameter or its gradient buffer was replaced since capture.
        """
        if self._current_addresses() != self._addresses:
            index = next(
                i for i, now in enumerate(self._current_addresses()) if now != self._addresses[i]
            )
            raise ReplayMismatchError(
                f"{self._label}: parameter {index} "
                f"(shape {tuple(self.parameters[index].shape)}) or its main_grad was moved to "
                "other memory after capture; the graphs would use the old one. Update it in place "
                "(copy_), or release the graphs and capture again."
            )
        self.is_bound = not self._own

    def bind(self) -> None:
        """Make ``param.grad`` the sinks, before the first replayed backward of a step."""
        self.is_bound = True
        with torch.no_grad():
            for index in self._own:
                if self._received[index]:
                    self._bind(index)

    def _bind(self, index: int) -> None:
        parameter, sink = self.parameters[index], self._sinks[index]
        if parameter.grad is sink:
            return
        if parameter.grad is None:
            # The one value x with x + g equal to g in every bit, also where g is -0.0.
            sink.fill_(-0.0)
        else:
            sink.copy_(parameter.grad)
        parameter.grad = sink

    def _hook(self, index: int, marker: GradientMarker | None) -> _Hook:
        sink, accumulate = self._sinks[index], self._accumulate

        def receive(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            self._received[index] = True
            if not getattr(leaf, "grad_added_to_main_grad", False):
                with torch.no_grad():
                    accumulate(sink, gradient)
            if marker is not None:
                marker.accumulated(index)

        return receive

    def _current_addresses(self) -> list[tuple[int, int]]:
        return [
            (p.data_ptr(), getattr(p, "main_grad", sink).data_ptr())
            for p, sink in zip(self.parameters, self._sinks, strict=True)
        ]


def _discard(leaf: torch.Tensor) -> None:
    leaf.grad = None


@contextmanager
def _taking_gradients(leaves: Sequence[nn.Parameter], hooks: Sequence[_Hook]) -> Iterator[None]:
    """Inside, each hook gets its leaf when ``leaf.grad`` holds one more gradient, and nothing else.

    Autograd hands a fresh gradient over without a copy only where ``grad`` is None.
    """
    kept = [leaf.grad for leaf in leaves]
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
        for leaf, grad in zip(leaves, kept, strict=True):
            leaf.grad = grad
