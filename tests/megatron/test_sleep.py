"""Megatron models whose graphs sleep between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import Trained

from chunkgraph import CaptureOptions
from chunkgraph.errors import SlotError

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(60)]


@pytest.mark.parametrize("scope", ["chunk", "block"])
def test_graphs_that_sleep_between_steps_equal_eager(
    one_rank: Any, make_config: Callable[..., Any], scope: str
) -> None:
    """With dropout, RoPE and a mask that every microbatch shares."""
    model = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    config = config_from_mapping(make_config(model=model))
    eager = Trained(one_rank, config, None)
    expected = [eager.results(step, count) for step, count in enumerate((2, 3, 1, 2))]
    graphed = Trained(one_rank, config, {"scope": scope, "options": CaptureOptions(can_sleep=True)})
    graphs = graphed.graphs
    for step, count in enumerate((2, 3, 1, 2)):
        results = graphed.results(step, count)
        assert results.keys() == expected[step].keys()
        assert all(torch.equal(results[name], expected[step][name]) for name in results)
        graphs.sleep()
        assert graphs.is_asleep is (step > 0)  # the first step is eager
        if step == 2:
            with pytest.raises(SlotError, match=r"Call wake\(\) or release\(\)"):
                graphed.step(step, count)
        graphs.wake()
    assert graphs.counters.replays == 6
    graphs.detach()
