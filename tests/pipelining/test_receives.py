"""Memory around the steps of stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from chunkgraph.engine import Host


def test_outputs_of_the_last_step_are_gone_before_a_capture(pipeline: Callable[..., Any]) -> None:
    """On a GPU they would keep the rest of their blocks of memory from the graphs."""
    num_kept: list[int] = []
    pipe = pipeline(
        nn.Linear(4, 4),
        host=Host(progress=lambda *_: num_kept.append(len(pipe.stages[0].output_chunks))),
    )
    pipe.step()
    assert len(pipe.stages[0].output_chunks) == 2
    assert not num_kept
    pipe.step()
    assert num_kept
    assert not any(num_kept)
