"""Mixture of experts with a fixed capacity: chunk graphs equal eager to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import expert_cases
import pytest
from packed_cases import all_but_the_first_replay
from small_settings import RECOMPUTED

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

_BALANCE, _Z = "load_balancing_loss", "z_loss"
_EXPERTS = {**expert_cases.EXPERTS, "moe_expert_capacity_factor": 1.0}
_BIASED = {**expert_cases.BIASED, "moe_router_topk": 2, "moe_expert_capacity_factor": 2.0}
_GROUPED = {**expert_cases.GROUPED, "moe_expert_capacity_factor": 1.0}


@pytest.fixture
def make(make_config: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return partial(expert_cases.case, make_config)


def _check(results: dict[str, dict[str, Any]], metrics: dict[str, set[str]]) -> None:
    all_but_the_first_replay(results)
    for name, result in results.items():
        for step in result["steps"]:
            recorded = {key for key, value in step["expert_metrics"].items() if value > 0}
            assert recorded == metrics[name], name


@pytest.mark.every_release
def test_one_rank(
    run_equal: Callable[..., Any], make: Callable[..., Any], once: Callable[..., Any]
) -> None:
    """Score functions, losses, expert bias, shared experts, dispatchers, dense layers, scopes."""
    more = once(
        {
            "half_precision": make(_BIASED, model={"params_dtype": "bfloat16"}),
            "recomputed_layers": make(
                _EXPERTS,
                model={**RECOMPUTED, "hidden_dropout": 0.0},
                capture={"scope": "chunk"},
            ),
        }
    )
    cases = {
        "softmax": make(_EXPERTS, capture={"verify": "poison"}),
        "biased": make(_BIASED, capture={"scope": "chunk", "verify": "shadow"}),
        "grouped_dense_first": make(
            {**_GROUPED, "moe_layer_freq": [0, 1]}, train={"use_ddp": False}
        ),
        "allgather": make({**_EXPERTS, "moe_token_dispatcher_type": "allgather"}),
        "recomputed": make(
            _BIASED,
            model={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        ),
        "overlapped": make(_BIASED, options=expert_cases.OVERLAP, capture={"verify": "poison"}),
        **more,
        "two_losses_predicting": make(
            {**_EXPERTS, "moe_aux_loss_coeff": 0.0},
            options={
                "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                "moe_aux_loss_coeff": [0.1, 0.2],
                "mtp_num_layers": 1,
            },
            capture={"scope": "chunk"},
        ),
    }
    results = run_equal(cases, 1, timeout_s=180.0)
    seq, everywhere = "seq_load_balancing_loss", "global_load_balancing_loss"
    _check(
        results,
        {
            "softmax": {_BALANCE, _Z},
            "biased": {seq, _Z},
            "grouped_dense_first": {everywhere},
            "allgather": {_BALANCE, _Z},
            "half_precision": {seq, _Z},
            "recomputed": {seq, _Z},
            "overlapped": {seq, _Z},
            "recomputed_layers": {_BALANCE, _Z},
            "two_losses_predicting": {_BALANCE, seq, _Z},
        },
    )
    drops = {name: result["dropped_tokens"] for name, result in results.items()}
    assert drops["softmax"] > 0
    assert drops["biased"] == drops["recomputed"] == 0  # room for all
    if more:
        assert drops["half_precision"] == 0
        assert drops["recomputed_layers"] > 0


@pytest.mark.slow
@pytest.mark.every_release
def test_two_ranks(
    run_equal: Callable[..., Any], make: Callable[..., Any], once: Callable[..., Any]
) -> None:
    """Experts on two ranks. `test_dropless` has pipelines, which do not depend on the capacity."""
    shared = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
    overlap = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    gathered = {**_EXPERTS, "moe_token_dispatcher_type": "allgather"}
    cases = {
        "ep2": make(_BIASED, pipeline=shared, train=overlap),
        **once({"ep2_allgather": make(gathered, pipeline=shared)}),
    }
    results = run_equal(cases, 2)
    _check(results, {"ep2": {"seq_load_balancing_loss", _Z}, "ep2_allgather": {_BALANCE, _Z}})
