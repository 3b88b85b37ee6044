"""The reports of a run, without Megatron's training program."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chunkgraph.engine.observer import Counters
from chunkgraph.launch.flags import GraphFlags
from chunkgraph.launch.hooks import StepMetrics, start_line
from chunkgraph.megatron.model_part import ChosenScope

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]


def _graphs(**changes: Any) -> Any:
    values = {"num_slots": (4, 2), "num_banks": 1, "scope": ChosenScope("chunk")}
    return SimpleNamespace(**{**values, **changes})


def test_the_first_line_has_scope_slots_and_graphs() -> None:
    graphs = _graphs()
    line = start_line(graphs, GraphFlags())
    assert "scope chunk, 4 + 2 slots on rank 0 (12 graphs), verify none; capture after" in line
    assert "\n" not in line
    graphs.num_banks = 2  # context-parallel sizes, or buckets
    assert "rank 0 (24 graphs)" in start_line(graphs, GraphFlags())
    graphs.scope = ChosenScope("block", "--cross-entropy-fusion-impl te")
    line = start_line(graphs, GraphFlags())
    assert "scope block (no whole chunk with --cross-entropy-fusion-impl te), 4 + 2" in line


def test_reasons_are_zero_again_after_their_step() -> None:
    """Otherwise a curve would keep its last value."""
    counters = Counters()
    graphs: Any = SimpleNamespace(
        counters=counters, find=lambda _: None, engine=SimpleNamespace(report=None)
    )
    metrics = StepMetrics(graphs)
    counters.fallbacks["capture warmup"] += 1
    counters.overflow_reruns["stash pages"] += 2
    metrics.step()
    assert metrics.scalars()["chunk-graphs/steps-run-again/stash pages"] == 2
    assert metrics.scalars()["chunk-graphs/eager-steps/capture warmup"] == 1
    counters.replays += 4
    metrics.step()
    scalars = metrics.scalars()
    assert scalars["chunk-graphs/replays"] == 4
    assert scalars["chunk-graphs/eager-steps/capture warmup"] == 0
    assert "chunk-graphs/dropped-tokens" not in scalars
    line = metrics.take_line()
    rerun_text = "steps run again (stash pages): 2 |"
    assert line == f" graph replays:     4 | {rerun_text} eager steps (capture warmup): 1 |"
    assert metrics.take_line() == " graph replays:     0 |"
