"""A replay that does not end, since its collectives wait for a stopped rank, is found and named."""

from __future__ import annotations

import gc
import threading
import time

import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.engine.hang import HangWatch

_TIMEOUT_S = 0.2


class Event:
    """Stands in for an event of a device."""

    def __init__(self) -> None:
        self.has_ended = True
        self.num_queries = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.num_queries += 1
        return self.has_ended


def _step(graphs: ChunkGraphs) -> None:
    with graphs.step(2):
        results = [graphs.callables[0](torch.ones(2, 4, requires_grad=True)) for _ in range(2)]
        for result in results:
            result.sum().backward()


def _num_watches() -> int:
    return sum(thread.name == "hang watch" for thread in threading.enumerate())


def _wait_for(condition: object, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.02)


def test_the_first_replay_that_does_not_end_is_named() -> None:
    events: list[Event] = []
    messages: list[str] = []

    def new_event() -> Event:
        events.append(Event())
        return events[-1]

    graphs = ChunkGraphs([nn.Linear(4, 4)], [2], options=CaptureOptions(num_warmup_steps=1))
    graphs.observe(HangWatch(["stage 0"], _TIMEOUT_S, new_event, messages.append))
    _step(graphs)  # warmup
    _step(graphs)
    assert len(events) == 4
    assert not any(event.num_queries for event in events)  # nothing waits for long
    _wait_for(lambda: all(event.num_queries for event in events))
    assert [event.num_queries for event in events] == [1] * 4  # once each, long after the replays
    assert messages == []

    # The backwards of both microbatches; the later one hangs because the earlier one does.
    events[2].has_ended = events[3].has_ended = False
    _step(graphs)
    _wait_for(lambda: messages)
    (message,) = messages
    assert "the replay of stage 0 backward microbatch 0 (slot 0) did not end" in message
    graphs.release()


def test_the_thread_ends_with_its_graphs() -> None:
    before = _num_watches()
    graphs = ChunkGraphs([nn.Linear(4, 4)], [1], options=CaptureOptions(num_warmup_steps=1))
    graphs.observe(HangWatch(["stage 0"], _TIMEOUT_S, Event, lambda _: None))
    assert _num_watches() == before + 1
    del graphs
    gc.collect()
    _wait_for(lambda: _num_watches() == before)
    assert _num_watches() == before
