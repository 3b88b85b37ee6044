"""When the gradients of a model chunk are reduced: with the last action that adds to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from chunkgraph.schedules import Action, Op, Schedule

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
        # The last actions of each chunk that add to its gradients. An eager backward adds them in
        # I already, so that I and W of the last microbatch both let reductions begin.
        self._last: dict[Action, int] = {}
        self._final: set[Action] = set()
        last: dict[int, Action] = {}
        for action in schedule.compute_actions(rank):
            if action.op.ends_lifetime:
                last[schedule.chunk_of(action.stage)] = action
        for chunk, action in last.items():
            self._final.add(action)
            self._last[action] = chunk
            if action.op is Op.W:
                self._last[replace(action, op=Op.I)] = chunk
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
            self._hold()
            return
        yield
        if action in self._final:
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
