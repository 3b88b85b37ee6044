"""Shadow mode next to Megatron's training compares every replay and changes no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(120)]

_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_SHADOW = {"verify": "shadow", "num_verify_steps": 2}


@pytest.mark.slow
def test_shadow_agrees_and_changes_nothing(
    run_cases: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    """VPP 2 with overlapped reduction, TP 2, DP 2 with all of DDP's overlap, recomputed layers."""
    overlap = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    pipelines: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
        "pp2_vpp2": (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            {"num_microbatches": [2, 2, 4, 2], "overlap_grad_reduce": True},
            {},
        ),
        "tp2": ({"tensor_model_parallel_size": 2}, {}, {}),
        "dp2": (
            {"data_parallel_size": 2},
            {"num_microbatches": [2, 1, 3, 2], **overlap},
            {"bucket_size": 8000, "overlap_param_gather": True},
        ),
    }
    cases = {
        f"{name}_{scope}": {
            "config": make_config(
                model={
                    **(_RECOMPUTED if name == "tp2" else _DROPOUT),
                    "num_layers": 4 if name == "pp2_vpp2" else 2,
                },
                pipeline=pipeline,
                train=train,
                capture={**_SHADOW, "scope": scope},
            ),
            "ddp_options": ddp,
        }
        for name, (pipeline, train, ddp) in pipelines.items()
        for scope in ("block", "chunk")
    }
    for name, result in run_cases(cases, 2).items():
        assert result["parameters_equal"], name
        assert all(s["loss_equal"] and s["grad_norm_equal"] for s in result["steps"]), name
        assert all(s["replays"] for s in result["steps"][1:]), name
