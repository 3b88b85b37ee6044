"""Refuse optimizer steps while microbatches are in flight.

Eager training refuses a backward through parameters that were updated after its forward. A replayed
backward would read the updated values, so the optimizer's step is refused instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from chunkgraph.engine.checks import ModelGuard
from chunkgraph.errors import ReplayMismatchError

__all__ = ["optimizers_watched"]

_running: list[tuple[Sequence[ModelGuard], Callable[[], int]]] = []


@contextmanager
def optimizers_watched(
    guards: Sequence[ModelGuard], num_in_flight: Callable[[], int]
) -> Iterator[None]:
    """Watch all optimizers in this block, a step that replays.

    Args:
        guards: the guards of the captured chunks.
        num_in_flight: returns the number of microbatches that wait for their backward.

    Raises:
        ReplayMismatchError: ``optimizer.step()`` was called while microbatches are in flight, and
            the optimizer has parameters of a chunk.
    """
    _register_hook()
    step = guards, num_in_flight
    _running.append(step)
    try:
        yield
    finally:
        _running.remove(step)


@functools.cache
def _register_hook() -> None:
    """Register a hook, once per process, that is called for every optimizer."""
    register_optimizer_step_pre_hook(_before)


def _before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for guards, num_in_flight in _running:
        if not (number := num_in_flight()):
            continue
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for guard in guards:
            if any(id(p) in stepped for p in guard.parameters):
                raise ReplayMismatchError(
                    f"{guard.label}: an optimizer ({type(optimizer).__name__}) steps while "
                    f"{number} microbatches wait for their backward, which would read the new "
                    "parameters. Run all backwards before optimizer.step()."
                )
