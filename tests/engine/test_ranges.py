"""Names of replays in profiles."""

from __future__ import annotations

import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, ChunkGraphs, ReplayRanges


def _step(graphs: ChunkGraphs, count: int) -> None:
    with graphs.step(count):
        # One microbatch ahead, as the first stage of two.
        waiting = [graphs.callables[0](torch.ones(2, 4, requires_grad=True))]
        for _ in range(count - 1):
            waiting.append(graphs.callables[0](torch.ones(2, 4, requires_grad=True)))
            waiting.pop(0).sum().backward()
        waiting.pop(0).sum().backward()


def _ranges(graphs: ChunkGraphs, count: int) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _step(graphs, count)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if " microbatch " in event.name]


def test_a_range_names_chunk_action_and_microbatch() -> None:
    graphs = ChunkGraphs([nn.Linear(4, 4)], [2], options=CaptureOptions(num_warmup_steps=1))
    _step(graphs, 2)  # warmup
    assert _ranges(graphs, 3) == []  # names are off by default
    graphs.observe(ReplayRanges(["stage 0 chunk 0"]))
    expected = [
        *("forward microbatch 0", "forward microbatch 1", "backward microbatch 0"),
        *("forward microbatch 2", "backward microbatch 1", "backward microbatch 2"),
    ]
    for _ in range(2):
        assert _ranges(graphs, 3) == [f"stage 0 chunk 0 {name}" for name in expected]
    graphs.release()
