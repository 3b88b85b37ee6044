"""When the gradients of a model chunk are reduced: with the last action that adds to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from chunkgraph.schedules import Action, Schedule

__all__ = ["GradientSync"]


class GradientSync:
    """Gradient reductions of one rank in one step, held back until a chunk's last gradients.

    Args:
        config: Megatron's ModelParallelConfig, with its ``no_sync_func`` and ``grad_sync_func``.
        models: Model chunks of the rank.
        schedule: The schedule of the step.
        rank: Of the pipeline.
    """

    def __init__(
        self, config: Any, models: Sequence[nn.Module], schedule: Schedule, rank: int
    ) -> None:
        functions = config.no_sync_func
        if functions is None:
            functions = ()
        self._no_sync = functions if isinstance(functions, (list, tuple)) else (functions,)
        starts = config.grad_sync_func
        is_list = isinstance(starts, (list, tuple))
        self._starts = list(starts) if is_list else [starts] * len(models)
        self._models = models
        self._last: dict[Action, int] = {}
        last_of: dict[int, Action] = {}
        for action in schedule.compute_actions(rank):
            if action.op.ends_lifetime:
                last_of[schedule.chunk_of(action.stage)] = action
        self._last = {action: chunk for chunk, action in last_of.items()}
        self._held: contextlib.ExitStack | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Hold reductions back inside, but for those that `around` lets go."""
        self._hold()
        try:
            yield
        finally:
            self._let_go()

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Reduce the gradients of a chunk whose last ones ``action`` adds."""
        chunk = self._last.get(action)
        if chunk is None:
            yield
            return
        start = self._starts[chunk]
        if start is None:
            self._let_go()
            yield
        else:
            yield
            self._let_go()
            start(self._models[chunk].parameters())
        self._hold()

    def _hold(self) -> None:
        self._held = contextlib.ExitStack()
        for function in self._no_sync:
            self._held.enter_context(function())

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
