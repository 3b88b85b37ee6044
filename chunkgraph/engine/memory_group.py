"""Engines whose steps never overlap share memory, and sleep together.

What a graph keeps between two launches belongs to a microbatch in flight, and only an engine whose
step runs has any. So the pools of one engine are dead in the steps of another, and serve its graphs
as scratch and slots too. Static inputs are not shared: constant ones are not loaded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from chunkgraph.engine import arguments
from chunkgraph.engine.chunk import CaptureOptions, Chunk
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
        backend: makes the graphs of all engines.
        step_graphs: graphs of optimizers, which sleep too, by engine.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend
        self.step_graphs: WeakKeyDictionary[ChunkGraphs, list[StepGraph]] = WeakKeyDictionary()

    @classmethod
    def of(
        cls,
        chunks: Sequence[Chunk],
        options: CaptureOptions,
        backend: GraphBackend | None,
        other: ChunkGraphs | None,
    ) -> MemoryGroup:
        """Return the group of ``other``; a new one if that is None.

        Raises:
            ConfigError: the two cannot share memory.
        """
        if other is None:
            return cls(backend or arguments.default_backend(chunks, options))
        own = other.memory.backend
        devices = {p.device for chunk in chunks for p in chunk.parameters}
        problem = {
            "both have the same backend: pass none": backend not in (None, own),
            f"both are on {own.device}": not devices <= {own.device},
            "slots have no pages: leave out max_slots and max_slot_memory": options.has_pages,
            "both sleep: pass both can_sleep=True": options.can_sleep and not own.can_sleep,
        }
        for what, is_violated in problem.items():
            if is_violated:
                raise ConfigError(
                    f"{arguments.rank_label(chunks)}: shares_memory_with needs that {what}."
                )
        return other.memory

    def join(self, engine: ChunkGraphs) -> None:
        """Add an engine."""
        self.step_graphs[engine] = []

    def others(self, engine: ChunkGraphs) -> list[GraphSet]:
        """Return the graphs whose memory may serve those of ``engine``, which has none now.

        Poison would overwrite what libraries keep in a pool, and pages need slots of one layout.
        """
        engines = self.step_graphs if engine.takes_memory else ()
        return [graphs for e in engines if e.options.verify == "none" for graphs in e.sets()]

    def refuse_inside(self, what: str, only: ChunkGraphs | None = None) -> None:
        """Refuse what must not happen while a microbatch may be in flight.

        Args:
            what: what happens, in words.
            only: the engine of the microbatch; None: any engine.

        Raises:
            SlotError: a step runs.
        """
        for engine in self.step_graphs if only is None else [only]:
            if engine.mode is not StepMode.OUTSIDE:
                raise SlotError(
                    f"{what} inside a step of {engine.chunks[0].label}. End that step first."
                )

    def check_step(self, engine: ChunkGraphs, *, with_gradients: bool) -> None:
        """Refuse a step that may not begin now; see `ChunkGraphs.step`.

        Raises:
            SlotError: a step of these engines runs, or memory that this one uses sleeps.
        """
        self.refuse_inside("A step began")
        if self.is_asleep:
            raise SlotError(
                "A step began while graphs sleep. Call wake() or release() before, on every rank."
            )
        for chunk in engine.chunks:
            what = f"A step of {chunk.label} began"
            refuse_asleep(chunk.parameters, what, with_gradients=with_gradients)

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
