"""Refuse optimizer steps while microbatches are in flight.

Eager training refuses a backward through parameters that were updated after its forward. A replayed
backward would read the updated values, so the optimizer's step is refused instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from chunkgraph.engine.watch.captured_model import CapturedModel
from chunkgraph.errors import ReplayMismatchError

__all__ = ["optimizers_watched"]


@dataclass(frozen=True, eq=False)
class _Step:
    models: Sequence[CapturedModel]
    num_in_flight: Callable[[], int]


_running: list[_Step] = []


@contextmanager
def optimizers_watched(
    models: Sequence[CapturedModel], num_in_flight: Callable[[], int]
) -> Iterator[None]:
    """Watch all optimizers in this block, a step that replays.

    Args:
        models: The captured models.
        num_in_flight: Function that returns the number of microbatches that wait for their
            backward.

    Raises:
        ReplayMismatchError: ``optimizer.step()`` was called while microbatches are in flight, and
            the optimizer has parameters of a model.
    """
    _register_hooks()
    step = _Step(models, num_in_flight)
    _running.append(step)
    try:
        yield
    finally:
        _running.remove(step)


@functools.cache
def _register_hooks() -> None:
    """Register hooks, once per process, that are called for every optimizer."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for step in _running:
        if step.num_in_flight():
            for model in _updated_models(step, optimizer):
                raise ReplayMismatchError(
                    f"{model.label}: an optimizer ({type(optimizer).__name__}) steps while "
                    f"{step.num_in_flight()} microbatches wait for their backward, which would "
                    "read the new parameters. Run all backwards before optimizer.step()."
                )


def _after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for step in _running:
        for model in _updated_models(step, optimizer):
            model.count_writes()


def _updated_models(step: _Step, optimizer: Optimizer) -> list[CapturedModel]:
    """Return the models with parameters of the optimizer."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [m for m in step.models if any(id(p) in stepped for p in m.parameters)]
