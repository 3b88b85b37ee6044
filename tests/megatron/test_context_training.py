"""Whole jobs whose microbatches have context-parallel sizes of their own, against eager training."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

_ROWS = 12
Case = Callable[..., dict[str, Any]]


@pytest.fixture
def make_case(make_config: Callable[..., Any], tmp_path: Path) -> Case:
    """A run on documents of 2 to 40 bytes, where a rank has 12 rows."""
    letters = random.Random(5)
    documents = [
        "".join(letters.choices("abcdefgh ", k=letters.choice([2, 5, 8, 20, 38]))) + "z"
        for _ in range(60)
    ]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents), encoding="utf-8")

    def make(
        counts: list[int],
        sizes: list[int],
        *,
        schedule: str = "random",
        captured: tuple[int, ...] = (),
        model: dict[str, Any] | None = None,
        capture: dict[str, Any] | None = None,
        **pipeline: Any,
    ) -> dict[str, Any]:
        return {
            "config": make_config(
                model={"layer_spec": "user_specs:packed_contexts", "num_layers": 2, **(model or {})},
                pipeline=pipeline,
                train={"num_microbatches": counts, "micro_batch_size": 1},
                data={"path": str(path)},
                packing={
                    "max_packed_seqs": 8,
                    "max_packed_tokens": _ROWS,
                    "context_parallel_sizes": sizes,
                    "context_parallel_schedule": schedule,
                    "cuda_graph_cp_sizes": list(captured),
                },
                capture=capture or {},
            )
        }

    return make


def test_pp1(run_cases: Callable[..., Any], make_case: Case) -> None:
    cases = {"pp1": make_case([1] * 12, [1, 2, 4], data_parallel_size=4)}
    result = run_cases(cases, 4)["pp1"]
    for s in result["steps"]:
        print({k: s[k] for k in ("loss_chunk", "loss_eager", "grad_norm_chunk", "loss_equal", "grad_norm_equal", "context_sizes", "fallbacks", "num_microbatches", "step_ms_chunk", "step_ms_eager")})
    print(result["replays_of_bank"], result["missing_banks"], result["different_parameters"])
    assert 0
