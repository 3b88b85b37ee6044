"""Whole jobs on packed documents: chunk graphs against eager training, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

_TOKENS = 192


def _case(
    make_config: Callable[..., Any],
    counts: list[int],
    *,
    seqs: int = 12,
    scope: str = "chunk",
    spec: str = "packed",
    verify: str = "none",
    model: dict[str, Any] | None = None,
    **pipeline: Any,
) -> dict[str, Any]:
    return {
        "config": make_config(
            model={
                "layer_spec": f"user_specs:{spec}",
                "num_layers": 4,
                "seq_length": _TOKENS,
                **(model or {}),
            },
            pipeline=pipeline,
            train={"num_microbatches": counts, "micro_batch_size": 1},
            packing={"max_packed_seqs": seqs},
            capture={"scope": scope, "verify": verify},
        )
    }


def _check(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        wrong = [s for s in result["steps"] if not (s["loss_equal"] and s["grad_norm_equal"])]
        assert not wrong, f"{name}: {wrong}"
        assert result["different_parameters"] == {}, name
        assert result["capture_sessions"] == 1, name
        assert len({s["loss_chunk_hex"] for s in result["steps"]}) == len(result["steps"]), name


def test_one_rank(run_cases: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    cases = {
        "block": _case(make_config, [2, 3, 1, 4], scope="block", verify="poison"),
        "chunk": _case(make_config, [2, 3, 1, 4], model={"hidden_dropout": 0.1}),
    }
    results = run_cases(cases, 1)
    print(results)
    _check(results)
