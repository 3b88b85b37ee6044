"""A replay that does not end, since its collectives wait for a stopped rank, is found and named."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, ChunkGraphs, hang
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


def _watches() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "hang watch"}


def _wait_for(condition: object, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.02)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Return the events of all replays, in order, while the watch loses its patience soon."""
    monkeypatch.setattr(hang, "_PATIENCE_S", 0.5)
    return []


def _watched(events: list[Event], messages: list[str]) -> ChunkGraphs:
    """Return captured graphs whose watch keeps its events and its message."""

    def new_event() -> Event:
        events.append(Event())
        return events[-1]

    graphs = ChunkGraphs([nn.Linear(4, 4)], [2], options=CaptureOptions(num_warmup_steps=1))
    graphs.observe(HangWatch(["stage 0"], _TIMEOUT_S, new_event, messages.append))
    _step(graphs)  # warmup
    _step(graphs)
    assert len(events) == 4
    assert not any(event.num_queries for event in events)  # nothing waits for long
    return graphs


def test_the_first_replay_that_does_not_end_is_named(events: list[Event]) -> None:
    messages: list[str] = []
    graphs = _watched(events, messages)
    _wait_for(lambda: all(event.num_queries > 10 for event in events))
    assert messages == []
    _step(graphs)
    # The backwards of both microbatches; the later one hangs because the earlier one does.
    events[6].has_ended = events[7].has_ended = False
    _wait_for(lambda: messages)
    (message,) = messages
    assert "the replay of stage 0 backward microbatch 0 (slot 0) did not end" in message
    graphs.release()


def test_a_long_queue_of_the_device_is_no_hang(events: list[Event]) -> None:
    """Replays end one after the other, long after the host launched the last one."""
    messages: list[str] = []
    graphs = _watched(events, messages)
    for event in events:
        event.has_ended = False
    for event in events:
        time.sleep(0.4)  # twice the timeout, less than the patience
        event.has_ended = True
    assert messages == []
    graphs.release()


def test_the_thread_ends_with_its_graphs() -> None:
    before = _watches()
    graphs = ChunkGraphs([nn.Linear(4, 4)], [1], options=CaptureOptions(num_warmup_steps=1))
    graphs.observe(HangWatch(["stage 0"], _TIMEOUT_S, Event, lambda _: None))
    (own,) = _watches() - before
    assert own.is_alive()
    del graphs
    gc.collect()
    own.join(5.0)
    assert not own.is_alive()
