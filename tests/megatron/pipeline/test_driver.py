"""Megatron's training, driven by the actions of a schedule, equals Megatron's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]


def _case(
    make_config: Callable[..., Any],
    schedule: str,
    pipeline: dict[str, Any],
    counts: list[int],
    train: dict[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    return {
        "probe": "schedule",
        "schedule": schedule,
        "config": make_config(
            pipeline=pipeline,
            train={"num_microbatches": counts, "micro_batch_size": 2, **(train or {})},
            **sections,
        ),
    }


def _check(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        for actual, expected in (*result["losses"], *result["grad_norms"]):
            assert actual == expected, name
        assert result["different"] == [], name
        assert len({loss for loss, _ in result["losses"]}) == len(result["losses"]), name


def test_eager_steps_equal_megatrons_functions(
    run_cases: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    pp2 = {"pipeline_model_parallel_size": 2}
    vpp2 = {**pp2, "virtual_pipeline_model_parallel_size": 2}
    overlap = {"overlap_grad_reduce": True}
    _check(
        run_cases(
            {
                "1f1b": _case(make_config, "1f1b", pp2, [1, 2, 5, 3], model=dropout),
                "tied": _case(
                    make_config,
                    "1f1b",
                    pp2,
                    [2, 3],
                    model={"untie_embeddings_and_output_weights": False},
                ),
                "interleaved": _case(make_config, "interleaved", vpp2, [2, 4, 6], model=dropout),
                "overlap": _case(make_config, "1f1b", pp2, [3, 4], overlap),
                "interleaved_overlap": _case(make_config, "interleaved", vpp2, [4, 2], overlap),
            },
            2,
        )
    )


def test_four_ranks(run_cases: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    pp4 = {"pipeline_model_parallel_size": 4}
    pp2 = {"pipeline_model_parallel_size": 2}
    overlap = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    _check(
        run_cases(
            {
                "pp4": _case(make_config, "1f1b", pp4, [1, 3, 6]),
                "tp2": _case(make_config, "1f1b", {**pp2, "tensor_model_parallel_size": 2}, [2, 3]),
                "dp2": _case(
                    make_config, "1f1b", {**pp2, "data_parallel_size": 2}, [3, 2], overlap
                ),
                "dp2_vpp2": _case(
                    make_config,
                    "interleaved",
                    {
                        **pp2,
                        "data_parallel_size": 2,
                        "virtual_pipeline_model_parallel_size": 2,
                    },
                    [4, 2],
                    {**overlap, "overlap_param_gather": True},
                ),
            },
            4,
        )
    )
