"""Mixture of experts with a fixed capacity: chunk graphs equal eager to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

_BALANCE, _Z = "load_balancing_loss", "z_loss"
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_expert_capacity_factor": 1.0,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}
_BIASED = {
    **_EXPERTS,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_shared_expert_intermediate_size": 32,
    "moe_expert_capacity_factor": 2.0,
}
_GROUPED = {
    **_EXPERTS,
    "moe_router_pre_softmax": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_z_loss_coeff": None,
}
_GATED = {"num_layers": 2, "swiglu": True, "normalization": "RMSNorm", "hidden_dropout": 0.1}


def _config(
    make_config: Callable[..., dict[str, Any]],
    experts: dict[str, Any],
    counts: list[int],
    *,
    model: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> dict[str, Any]:
    config = make_config(
        model={**_GATED, **(model or {})},
        moe=experts,
        train={"num_microbatches": counts, **(train or {})},
        **sections,
    )
    return {"config": config}


def _check(results: dict[str, dict[str, Any]], metrics: dict[str, set[str]]) -> None:
    for name, result in results.items():
        assert len({s["loss_chunk_hex"] for s in result["steps"]}) == len(result["steps"]), name
        for step in result["steps"]:
            recorded = {key for key, value in step["expert_metrics"].items() if value > 0}
            assert recorded == metrics[name], name
        assert all(step["replays"] > 0 for step in result["steps"][1:]), name


@pytest.mark.every_release
def test_one_rank(
    run_equal: Callable[..., Any], make_config: Callable[..., Any], once: Callable[..., Any]
) -> None:
    """Score functions, losses, expert bias, shared experts, dispatchers, dense layers, scopes."""
    make, counts = make_config, [2, 1, 3]
    layers = {"recompute_granularity": "full", "recompute_method": "uniform"}
    more = once(
        {
            "half_precision": _config(make, _BIASED, counts, model={"params_dtype": "bfloat16"}),
            "recomputed_layers": _config(
                make,
                _EXPERTS,
                counts,
                model={**layers, "recompute_num_layers": 1, "hidden_dropout": 0.0},
                capture={"scope": "chunk"},
            ),
        }
    )
    cases = {
        "softmax": _config(make, _EXPERTS, counts, capture={"verify": "poison"}),
        "biased": _config(make, _BIASED, counts, capture={"scope": "chunk", "verify": "shadow"}),
        "grouped_dense_first": _config(
            make, {**_GROUPED, "moe_layer_freq": [0, 1]}, counts, train={"use_ddp": False}
        ),
        "allgather": _config(
            make,
            {**_EXPERTS, "moe_token_dispatcher_type": "allgather"},
            [2, 1, 3],
        ),
        "recomputed": _config(
            make,
            _BIASED,
            [2, 1, 3],
            model={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        ),
        "overlapped": {
            **_config(make, _BIASED, [2, 1, 3], capture={"verify": "poison"}),
            "transformer_options": {"moe_shared_expert_overlap": True, "add_bias_linear": False},
        },
        **more,
        "two_losses_predicting": {
            **_config(make, {**_EXPERTS, "moe_aux_loss_coeff": 0.0}, [2, 1, 3]),
            "transformer_options": {
                "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                "moe_aux_loss_coeff": [0.1, 0.2],
                "mtp_num_layers": 1,
            },
        },
    }
    cases["two_losses_predicting"]["config"]["capture"] = {"scope": "chunk"}
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


@pytest.mark.every_release
def test_two_ranks(
    run_equal: Callable[..., Any], make_config: Callable[..., Any], once: Callable[..., Any]
) -> None:
    """PP 2 x VPP 2, a stage without experts, experts on two ranks."""
    make = make_config
    interleaved = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    shared = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
    overlap = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    gathered = {**_EXPERTS, "moe_token_dispatcher_type": "allgather"}
    cases = {
        "ep2": _config(make, _BIASED, [2, 1, 3], pipeline=shared, train=overlap),
        # Megatron's pipelines do not depend on experts; both dispatchers are above.
        **once(
            {
                "pp2_vpp2": _config(
                    make,
                    _BIASED,
                    [2, 2, 4],
                    model={"num_layers": 4},
                    pipeline=interleaved,
                    train={"overlap_grad_reduce": True},
                ),
                "pp2_dense_stage": _config(
                    make,
                    {**_EXPERTS, "moe_layer_freq": [0, 1]},
                    [3, 1, 5],
                    pipeline={"pipeline_model_parallel_size": 2},
                    capture={"scope": "chunk"},
                ),
                "ep2_allgather": _config(make, gathered, [2, 1, 3], pipeline=shared),
            }
        ),
    }
    results = run_equal(cases, 2)
    seq = "seq_load_balancing_loss"
    _check(
        results,
        {
            "pp2_vpp2": {seq, _Z},
            "pp2_dense_stage": {_BALANCE, _Z},
            "ep2": {seq, _Z},
            "ep2_allgather": {_BALANCE, _Z},
        },
    )


@pytest.mark.slow
def test_four_ranks(run_equal: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """PP 2 x EP 2 and PP 2 x VPP 2 x EP 2."""
    pipeline = {
        "pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
        "expert_model_parallel_size": 2,
    }
    cases = {
        "pp2_ep2": _config(make_config, _BIASED, [2, 1, 3], pipeline=pipeline),
        "pp2_vpp2_ep2": _config(
            make_config,
            _GROUPED,
            [2, 4, 2],
            model={"num_layers": 4},
            pipeline={**pipeline, "virtual_pipeline_model_parallel_size": 2},
            train={"overlap_grad_reduce": True, "use_distributed_optimizer": True},
            capture={"scope": "chunk"},
        ),
    }
    results = run_equal(cases, 4)
    _check(
        results,
        {
            "pp2_ep2": {"seq_load_balancing_loss", _Z},
            "pp2_vpp2_ep2": {"global_load_balancing_loss"},
        },
    )
