"""`StepGraph`: work that every training step repeats, as one graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

from chunkgraph.errors import CaptureError, SlotError
from chunkgraph.graphs import Graph, GraphBackend, Pool


class StepGraph:
    """Capture the work of a step, and replay it while nothing that it depends on changes.

    A step runs eagerly if its facts differ from those at the end of the step before. So the first
    step is eager, and one after each change; facts that change in every step keep all steps eager.

    Args:
        label: Name of the graph in errors.
        backend: Makes the graph.
        facts: Returns what the work depends on, besides the values of tensors: addresses, and
            values of Python.
        work: The work to capture. It may run Python that has no effect in a replay.
        agree: Element-wise maximum over the ranks whose collectives are in the work. The recorder
            needs it, since it runs collectives while it captures; None: there are none.
        on_failure: After a capture that failed, ``raise`` the error, or stay ``eager``.

    Attributes:
        num_captures: Captures so far.
        num_replays: Replays so far.
        pool: The graph's memory, of which nothing is needed between two steps; None: no graph.
    """

    def __init__(
        self,
        label: str,
        backend: GraphBackend,
        facts: Callable[[], Hashable],
        work: Callable[[], Any],
        agree: Callable[[list[int]], list[int]] | None,
        on_failure: str,
    ) -> None:
        self.num_captures = self.num_replays = 0
        self._label, self._backend = label, backend
        self._facts, self._work = facts, work
        self._agree = agree if backend.name == "recorder" else None
        self._on_failure = on_failure
        self._has_failed = False
        self._known: Hashable = None  # facts of the graph, or at the end of the last eager step
        self._graph: Graph | None = None
        self._result: Any = None
        self.pool: Pool | None = None

    def is_ready(self) -> bool:
        """Return whether this step can replay, after capturing the work if it was not captured.

        Raises:
            CaptureError: A graph cannot hold the work, and ``on_failure`` is ``raise``.
        """
        differs = self._has_failed or self._facts() != self._known
        if self._agree is not None:
            (differs,) = map(bool, self._agree([int(differs)]))
        if differs:
            self.release()
            return False
        if self._graph is None:
            self._capture()
        return not self._has_failed

    def replay(self) -> Any:
        """Replay the graph; return what the work returned: tensors until the next replay."""
        assert self._graph is not None
        assert self.pool is not None
        if self.pool.is_asleep:
            raise SlotError(
                f"The step of {self._label} was called while graphs sleep. Call wake() before."
            )
        self._graph.replay()
        self.num_replays += 1
        return self._result

    def end_eager_step(self) -> None:
        """Remember the facts of a step that did the work eagerly."""
        self._known = self._facts()

    def release(self) -> None:
        """Free the graph and its memory; the next step is eager."""
        graph, self._graph, self._known = self._graph, None, None
        self._result = self.pool = None
        if graph is not None:
            self._backend.synchronize()
            graph.release()

    def _capture(self) -> None:
        pool = self._backend.new_pool(self._label)
        try:
            with torch.no_grad(), self._backend.capture(self._label, pool) as graph:
                self._result = self._work()
        except CaptureError as error:
            self._has_failed = True
            if self._on_failure == "raise":
                raise
            warnings.warn(f"{error}\nThe optimizer runs eagerly on this rank.", stacklevel=5)
            return
        self._graph, self.pool = graph, pool
        self.num_captures += 1
