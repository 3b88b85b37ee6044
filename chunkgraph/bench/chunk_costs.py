"""Time the graphs of each chunk by themselves: F, and B or its halves I and W."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from chunkgraph.engine import ChunkGraphs

__all__ = ["chunk_costs", "chunk_graphs"]


def chunk_costs(
    engine: ChunkGraphs, device: torch.device, *, num_repeats: int = 20
) -> list[dict[str, float]]:
    """Replay the graphs of each chunk in turn, and return their median times.

    The replays read the last microbatch of the slot, add to gradients and draw random numbers. All
    ranks that share a graph's collectives call this together.

    Args:
        engine: The graphs of this rank, outside of a step.
        device: Device of the graphs.
        num_repeats: Number of timed replays.

    Returns:
        For each chunk the ms of F and B, or of F, I and W; without I where a chunk's inputs take
        no gradient. Empty without graphs.
    """
    measure = _on_gpu if device.type == "cuda" else _on_host
    costs = []
    for graphs in chunk_graphs(engine):
        with torch.no_grad():
            times = measure([graph.replay for graph in graphs.values()], num_repeats)
        costs.append(dict(zip(graphs, map(statistics.median, times), strict=True)))
    return costs


def chunk_graphs(engine: ChunkGraphs) -> list[dict[str, Any]]:
    """Return the graphs of the first slot of each chunk, by F, B, I and W; empty without graphs."""
    captured = getattr(engine, "_captured", None)
    return [] if captured is None else [_graphs_of(slots[0]) for slots in captured.slots]


def _graphs_of(slot: Any) -> dict[str, Any]:
    is_split = slot.weight_graph is not None
    graphs = {
        "F": slot.forward_graph,
        "I" if is_split else "B": slot.backward_graph,
        "W": slot.weight_graph,
    }
    return {name: graph for name, graph in graphs.items() if graph is not None}


def _on_gpu(replays: Sequence[Callable[[], None]], num_repeats: int) -> list[list[float]]:
    """Return the ms of each replay between two events; the host runs ahead of the device."""
    every = []
    for _ in range(num_repeats + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(replays) + 1)]
        events[0].record()
        for replay, event in zip(replays, events[1:], strict=True):
            replay()
            event.record()
        every.append(events)
    torch.cuda.synchronize()
    # The first round waits for the host.
    return [
        [events[i].elapsed_time(events[i + 1]) for events in every[1:]] for i in range(len(replays))
    ]


def _on_host(replays: Sequence[Callable[[], None]], num_repeats: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in replays]
    for _ in range(num_repeats):
        for replay, of_replay in zip(replays, times, strict=True):
            started = time.perf_counter()
            replay()
            of_replay.append((time.perf_counter() - started) * 1e3)
    return times
