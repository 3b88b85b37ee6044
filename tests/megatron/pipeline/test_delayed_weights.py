"""Layers that delay weight gradients compute them in W, with the bits of Megatron's 1F1B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from refused import refused
from torch import nn

from chunkgraph.megatron.core.data_parallel import facts_of_delays
from chunkgraph.megatron.refusals import DELAY_RULES

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]


@pytest.mark.slow
def test_weight_gradients_in_w_equal_those_of_whole_backwards(
    run_equal: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    def case(schedule: str = "zb-h1", **sections: Any) -> dict[str, Any]:
        model = {"layer_spec": "delayed_layers:delaying"}
        pipeline = {"pipeline_model_parallel_size": 2, "schedule": schedule}
        train = {"num_microbatches": [2, 3, 1, 4], "micro_batch_size": 2}
        for name, values in {"model": model, "pipeline": pipeline, "train": train}.items():
            sections[name] = {**values, **sections.get(name, {})}
        return {"config": make_config(**sections)}

    overlap = {"overlap_grad_reduce": True}
    run_equal(
        {
            "graphs": case(),
            "overlap": case(train=overlap, capture={"scope": "chunk", "verify": "shadow"}),
            "fused": case(
                train=overlap,
                model={"layer_spec": "delayed_layers:fusing"},
                capture={"scope": "chunk", "verify": "poison"},
            ),
            "interleaved": case(
                "interleaved-zb",
                pipeline={"virtual_pipeline_model_parallel_size": 2},
                train={**overlap, "num_microbatches": [2, 4, 2]},
            ),
        },
        2,
    )


@pytest.mark.slow
def test_a_schedule_without_graphs_leaves_no_weight_gradient_out(
    run_to_its_end: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    chunks = {"transformer_config": {"mlp_chunks_for_training": 2}}
    model = {"layer_spec": "delayed_layers:delaying", **chunks}
    pipeline = {"pipeline_model_parallel_size": 2, "schedule": "zb-h1"}
    config = make_config(model=model, pipeline=pipeline, capture={"enabled": False})
    codes, messages = run_to_its_end({"config": config})
    assert all(codes)
    assert all("DelayingColumn that delays its weight gradients" in text for text in messages)


class _Layer(nn.Module):
    """The part of a Transformer Engine layer that its store of weight gradients needs."""

    def __init__(self, *, delays: bool) -> None:
        super().__init__()
        self.wgrad_store = self
        self.delay_wgrad_compute = lambda: delays


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"splits_backward": True, "layers_at_once": True}, "layers of Transformer Engine would"),
        ({"splits_backward": True, "ddp_at_once": True}, "DDP would take weight gradients before"),
        (
            {"splits_backward": True, "use_transformer_engine_op_fuser": True},
            "fused operations do not",
        ),
        ({"splits_backward": False, "delay_wgrad_compute": True}, "unless a schedule splits"),
    ],
)
def test_what_would_compute_no_weight_gradients_is_refused(
    facts: dict[str, Any], message: str
) -> None:
    every = {"schedule": "zb-h1", **dict.fromkeys(("layers_at_once", "ddp_at_once"), False)}
    (text,) = refused(DELAY_RULES, {**every, **facts})
    assert message in text


def test_layers_that_were_built_without_it_are_seen() -> None:
    facts = facts_of_delays([nn.Sequential(_Layer(delays=True), _Layer(delays=False))])
    assert facts == {"layers_at_once": True, "ddp_at_once": False}
    assert not any(facts_of_delays([_Layer(delays=True), nn.Linear(2, 2)]).values())
