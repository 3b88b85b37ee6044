"""Modules that delay weight gradients themselves, as Transformer Engine's and Megatron's do.

With ``delay_wgrad_compute`` their backward computes only the input gradient, and keeps the data
from which their method ``backward_dw`` computes the weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.program import Receive
from chunkgraph.errors import CaptureError


class DelayedModules:
    """The modules of a chunk that delay their weight gradients.

    Args:
        module: The chunk's module; None if it has none.
        label: Name of the chunk in errors.
    """

    def __init__(self, module: nn.Module | None, label: str) -> None:
        self._label = label
        delaying = [m for m in module.modules() if _delays(m)] if module is not None else []
        # A module's method also calls those of its parts.
        self.modules = [m for m in delaying if {m} == {*m.modules()}.intersection(delaying)]

    def run_eagerly(self, is_last: bool) -> None:
        """Run in an eager step; ``is_last``: no later backward waits, so see `refuse_left`."""
        self.run(())
        if is_last:
            self.refuse_left()

    def run(self, leaves: Sequence[nn.Parameter], receive: Receive | None = None) -> None:
        """Compute the weight gradients of the modules' oldest backward, in backward order.

        Args:
            leaves: The tensors that the modules hold as parameters; their ``grad`` is None.
            receive: Function that takes the gradients out of ``grad``; None leaves them there.
        """
        for module in reversed(self.modules):
            compute: Callable[[], None] = module.backward_dw  # type: ignore[assignment]
            announced = _announced_gradients(module) if receive is None else []
            with torch.no_grad(), _sums_kept(module):  # without grad, as in a backward
                compute()
            for parameter, gradient in announced:
                if parameter.grad is gradient:
                    parameter.grad = None
            for index, leaf in enumerate(leaves):
                if receive is not None and leaf.grad is not None:
                    gradient, leaf.grad = leaf.grad, None
                    receive(index, gradient)

    @contextmanager
    def computing_at_once(self) -> Iterator[None]:
        """Compute weight gradients in the backward, inside, where a module's store can switch.

        A whole backward then holds the gradients of one module at a time.
        """
        stores: list[Any] = [getattr(module, "wgrad_store", None) for module in self.modules]
        switching = [s for s in stores if hasattr(s, "disable_delay_wgrad_compute")]
        for store in switching:
            store.disable_delay_wgrad_compute()
        try:
            yield
        finally:
            for store in switching:
                store.enable_delay_wgrad_compute()

    def refuse_left(self) -> None:
        """Check that no module waits for another call.

        Raises:
            CaptureError: A module waits because it ran more than once in the forward.
        """
        for module in self.modules:
            queue = getattr(getattr(module, "wgrad_store", None), "context", None)
            if queue is not None and not queue.empty():
                raise CaptureError(
                    f"{self._label}: a {type(module).__name__} that delays its weight gradients "
                    "runs more than once in a forward, and one backward_dw() computes those of one "
                    "run. Set delay_wgrad_compute=False, or split no backward."
                )


@contextmanager
def _sums_kept(module: nn.Module) -> Iterator[None]:
    """Add the gradients of this block to ``grad``, which a module may replace or leave as it is."""
    sums = [
        (parameter, parameter.grad)
        for parameter in module.parameters()
        if parameter.grad is not None and not hasattr(parameter, "main_grad")
    ]
    for parameter, _ in sums:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient_sum in sums:
            if parameter.grad is not None:
                gradient_sum.add_(parameter.grad)
            parameter.grad = gradient_sum


def _announced_gradients(module: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Set ``grad`` to zeros where the module adds to ``main_grad`` and ``grad`` is None.

    Such a module announces a gradient by an arbitrary ``grad`` in its backward. DDP expects one for
    every weight half and drops it there, so after two backwards the second half has none.
    """
    announced = []
    for parameter in module.parameters():
        if parameter.grad is None and getattr(parameter, "grad_added_to_main_grad", False):
            parameter.grad = parameter.new_zeros(()).expand_as(parameter)
            announced.append((parameter, parameter.grad))
    return announced


def _delays(module: nn.Module) -> bool:
    if not callable(getattr(module, "backward_dw", None)):
        return False
    store: Any = getattr(module, "wgrad_store", None)
    return store is None or bool(store.delay_wgrad_compute())
