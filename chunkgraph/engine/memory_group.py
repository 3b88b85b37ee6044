"""Engines whose steps never overlap share memory, and sleep together.

What a graph keeps between two launches belongs to a microbatch in flight, and only an engine whose
step runs has any. So the pools of one engine are dead in the steps of another, and serve its graphs
as scratch and slots too. Static inputs are not shared: constant ones are not loaded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from chunkgraph.engine.step import StepMode
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.graphs import GraphBackend, Pool
from chunkgraph.memory import pools
from chunkgraph.memory.sleeping import refuse_asleep
from chunkgraph.optimizer import StepGraph

if TYPE_CHECKING:
    from chunkgraph.engine.capture.graph_set import GraphSet
    from chunkgraph.engine.engine import ChunkGraphs


class MemoryGroup:
    """The memory of one engine, or of several that share it.

    Args:
        backend: makes the graphs of all engines.

    Attributes:
        step_graphs: graphs of each engine's optimizers, which sleep too.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend
        self.step_graphs: WeakKeyDictionary[ChunkGraphs, list[StepGraph]] = WeakKeyDictionary()

    def join(self, engine: ChunkGraphs) -> None:
        """Add an engine.

        Raises:
            ConfigError: it cannot take the memory of the others: its slots need one layout.
        """
        if self.step_graphs and engine.options.has_pages:
            raise ConfigError(
                "shares_memory_with cannot be combined with paged slots. Leave one of them out."
            )
        self.step_graphs[engine] = []

    def sets(self) -> list[GraphSet]:
        """Return all graphs whose memory may serve others.

        Poison (``verify``) would overwrite what libraries keep in a pool.
        """
        engines = (e for e in self.step_graphs if e.options.verify == "none")
        return [graphs for engine in engines for graphs in engine.sets()]

    def refuse_inside(self, what: str, only: ChunkGraphs | None = None) -> None:
        """Refuse what must not happen while a microbatch of any engine may be in flight.

        Raises:
            SlotError: a step runs, of ``only`` if that is not None.
        """
        for engine in self.step_graphs if only is None else [only]:
            if engine.mode is not StepMode.OUTSIDE:
                label = engine.chunks[0].label
                raise SlotError(f"{what} inside a step of {label}. End that step first.")

    def check_step(self, engine: ChunkGraphs, *, trains: bool, what: str = "A step began") -> None:
        """Refuse a step, or a capture, that may not begin now; see `ChunkGraphs.step`.

        Raises:
            SlotError: a step of these engines runs, or memory that this one uses sleeps.
        """
        self.refuse_inside(what)
        if self.is_asleep:
            raise SlotError(
                f"{what} while graphs sleep. Call wake() or release() before, on every rank."
            )
        for chunk in engine.chunks:
            refuse_asleep(chunk.label, chunk.tensors(), with_gradients=trains)

    @property
    def is_asleep(self) -> bool:
        """Return whether the memory was given back."""
        return any(pool.is_asleep for pool in self._pools())

    def sleep(self) -> None:
        """See `ChunkGraphs.sleep`."""
        self.refuse_inside("sleep() was called")
        if not self.backend.can_sleep:
            raise ConfigError(
                "sleep() needs CaptureOptions(can_sleep=True), or a backend with can_sleep=True."
            )
        if (every := self._pools()) and not self.is_asleep:
            self.backend.release_cached_memory()  # waits for the device
            for engine in self.step_graphs:
                for graphs in engine.sets() if engine.recaptures else ():
                    graphs.inputs_slept()
            for pool in every:
                pool.sleep()

    def wake(self, label: str) -> None:
        """See `ChunkGraphs.wake`; ``label`` names the rank in errors."""
        if asleep := [pool for pool in self._pools() if pool.is_asleep]:
            self.backend.release_cached_memory()
            pools.wake(asleep, self.backend, label)
            for graphs in (graphs for engine in self.step_graphs for graphs in engine.sets()):
                graphs.inputs_woke()

    def _pools(self) -> list[Pool]:
        """Return all pools, each once."""
        found: list[Pool] = []
        for engine, step_graphs in self.step_graphs.items():
            found += [pool for graphs in engine.sets() for pool in graphs.pools.every]
            found += [graph.pool for graph in step_graphs if graph.pool is not None]
        return pools.distinct(found)
