"""Shadow mode next to Megatron's training compares every replay and changes no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(120)]

_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.mark.slow
def test_shadow_agrees_and_changes_nothing(
    run_cases: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    """Verify two data-parallel ranks with all of DDP's overlap, in both scopes."""
    train = {
        "num_microbatches": [2, 1, 3, 2],
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
    }
    cases = {
        scope: {
            "config": make_config(
                model={**_DROPOUT, "num_layers": 2},
                pipeline={"data_parallel_size": 2},
                train=train,
                capture={"verify": "shadow", "num_verify_steps": 2, "scope": scope},
            ),
            "ddp_options": {"bucket_size": 8000, "overlap_param_gather": True},
        }
        for scope in ("block", "chunk")
    }
    for name, result in run_cases(cases, 2).items():
        assert result["parameters_equal"], name
        assert all(s["different"] == [] for s in result["steps"]), name
        assert all(s["replays"] for s in result["steps"][1:]), name
