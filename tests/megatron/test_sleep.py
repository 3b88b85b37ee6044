"""Megatron models whose graphs sleep between steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import Trained

from chunkgraph import CaptureOptions
from chunkgraph.errors import SlotError
from chunkgraph.trainer.model import build_optimizer

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


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="Megatron then takes Transformer Engine's Adam, which needs a GPU",
)
def test_a_reference_model_takes_no_memory_of_its_own(
    one_rank: Any, make_config: Callable[..., Any]
) -> None:
    """Its graphs lie in the policy's memory; optimizer graphs sleep too."""
    config = config_from_mapping(make_config(model={"hidden_dropout": 0.1}))

    def cycles(options: dict[str, Any] | None) -> tuple[list[torch.Tensor], list[Trained]]:
        policy, results = Trained(one_rank, config, options), []
        optimizer = build_optimizer(config, policy.chunks)
        if options is not None:
            policy.graphs.capture_optimizer(optimizer)
        shared = None if options is None else {**options, "shares_memory_with": policy.graphs}
        reference = Trained(one_rank, config, shared, seed=2)
        reference.chunks[0].requires_grad_(False)
        for number, count in enumerate((2, 3, 1, 2)):
            with torch.no_grad():
                losses = reference.step(number, count, forward_only=True)
            results += [torch.tensor(losses), *policy.results(number, count).values()]
            optimizer.step()
            optimizer.zero_grad()
            if options is not None:
                reference.graphs.sleep()
                assert policy.graphs.is_asleep is (number > 0)
                if number > 0:
                    with pytest.raises(SlotError, match="gradients was called while graphs sleep"):
                        optimizer.step()
                policy.graphs.wake()
        return results, [policy, reference]

    expected, _ = cycles(None)
    got, models = cycles({"options": CaptureOptions(can_sleep=True)})
    assert all(map(torch.equal, got, expected))
    policy, reference = (model.graphs.engine for model in models)
    assert policy.counters.replays == 6
    assert reference.forward_only.counters.replays == 6
    pools = [
        {id(p) for s in engine.sets() for p in s.pools.pools} for engine in (policy, reference)
    ]
    assert pools[1] <= pools[0]
