"""When the gradients of a model chunk are reduced: with the last action that adds to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from chunkgraph.schedules import Action, Op

__all__ = ["GradientSync", "LastGradients", "last_gradients"]


class LastGradients(NamedTuple):
    """The last gradients of a chunk in a step.

    Attributes:
        chunk: Index of the chunk.
        are_final: Whether none come later, whether or not the backward is split.
    """

    chunk: int
    are_final: bool


def last_gradients(
    actions: Sequence[Action], chunk_of: Callable[[int], int]
) -> dict[int, LastGradients]:
    """Return which of a rank's actions add the last gradients of its chunks, by their index.

    An eager backward adds most gradients in I already, so the last I and the last W both count;
    they may belong to different microbatches.

    Args:
        actions: The actions; B only where no backward is split.
        chunk_of: Returns the index of a stage among the rank's chunks.
    """
    last = {(action.op, chunk_of(action.stage)): i for i, action in enumerate(actions)}
    return {
        index: LastGradients(chunk, op is not Op.I)
        for (op, chunk), index in last.items()
        if op in (Op.B, Op.I, Op.W)
    }


class GradientSync:
    """Gradient reductions of one rank in one step, held back until a chunk's last gradients.

    Args:
        config: Megatron's ModelParallelConfig, with its ``no_sync_func`` and ``grad_sync_func``.
        models: Model chunks of the rank.
    """

    def __init__(self, config: Any, models: Sequence[nn.Module]) -> None:
        functions = config.no_sync_func
        if functions is None:
            functions = ()
        self._no_sync = functions if isinstance(functions, (list, tuple)) else (functions,)
        starts = config.grad_sync_func
        is_list = isinstance(starts, (list, tuple))
        self._starts = list(starts) if is_list else [starts] * len(models)
        self._models = models
        self._held: contextlib.ExitStack | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Hold reductions back inside, except those that `around` runs."""
        self._hold()
        try:
            yield
        finally:
            self._let_go()

    @contextlib.contextmanager
    def around(self, last: LastGradients) -> Iterator[None]:
        """Reduce the gradients of a chunk; the action inside adds the last ones."""
        start = self._starts[last.chunk]
        if start is None:
            self._let_go()
            yield
            self._hold()
            return
        yield
        if last.are_final:
            self._let_go()
            start(self._models[last.chunk].parameters())
            self._hold()

    def _hold(self) -> None:
        self._held = contextlib.ExitStack()
        for function in self._no_sync:
            self._held.enter_context(function())

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
