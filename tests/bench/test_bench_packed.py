"""A bench packs the same documents for every variant, and counts fallbacks and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chunkgraph.bench.document import VariantResult
from chunkgraph.data import DrawnDocuments

pytestmark = pytest.mark.timeout(100)

_COUNTS = (3, 5, 8, 12)
_TOKENS, _SEQS, _WARMUP, _STEPS = 48, 7, 3, 6


def _case(make_config: Callable[..., Any], **sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "probe": "bench",
        "variants": ["eager", "chunk"],
        "config": make_config(
            model={"layer_spec": "user_specs:packed", "num_layers": 2},
            pipeline=sections.get("pipeline", {}),
            train={"num_microbatches": [2, 3], "micro_batch_size": 1, "seed": 8},
            data={"document_counts": list(_COUNTS)},
            packing={
                "max_packed_seqs": _SEQS,
                "max_packed_tokens": _TOKENS,
                **sections.get("packing", {}),
            },
            capture={"scope": "chunk"},
            bench={"num_warmup_steps": _WARMUP, "num_steps": _STEPS},
        ),
    }


def _documents(num_data_ranks: int) -> list[list[tuple[int, ...]]]:
    """Return each measured step's documents: all microbatches of all data-parallel ranks."""
    drawn = DrawnDocuments.from_file(None, _COUNTS, num_tokens=_TOKENS, seed=8)
    return [
        [drawn.lengths(step, m, r) for m in range(2 + step % 2) for r in range(num_data_ranks)]
        for step in range(_WARMUP, _WARMUP + _STEPS)
    ]


def _check(result: dict[str, Any], num_data_ranks: int) -> None:
    steps = _documents(num_data_ranks)
    misfits = [[len(lengths) >= _SEQS for lengths in step] for step in steps]
    num_eager = sum(any(step) for step in misfits)
    assert 0 < num_eager < _STEPS
    eager, chunk = result["eager"], result["chunk"]
    assert (
        VariantResult("chunk", None, chunk).first_difference(VariantResult("eager", None, eager))
        is None
    )
    assert len(eager["parameters_sha256"]) == len(chunk["parameters_sha256"]) == 2  # ranks
    assert (eager["fallbacks"], eager["fallback_share"]) == ({}, 0)
    assert chunk["fallbacks"] == {"packing overflow": num_eager}
    assert chunk["packing_overflows"] == {"too many documents": num_eager}
    assert chunk["fallback_share"] == num_eager / _STEPS
    num_tokens = sum(sum(lengths) for step in steps for lengths in step)
    for summary in (eager, chunk):
        assert summary["misfit_share"] == pytest.approx(
            sum(map(sum, misfits)) / sum(map(len, misfits))
        )
        # Steps have two or three microbatches of each data-parallel rank.
        fitting = 1 - summary["expected_misfit_share"]
        steps_fitting = [fitting ** (n * num_data_ranks) for n in (2, 3)]
        assert summary["expected_misfit_steps"] == pytest.approx(1 - sum(steps_fitting) / 2)
        seconds = sum(summary["step_ms_all"]) / 1e3
        assert summary["tokens_per_s"] == pytest.approx(num_tokens / seconds)
        assert summary["host_us_forward"] is None or summary["host_us_forward"] > 0
    assert chunk["replayed_step_ms"] > 0
    assert chunk["fallback_step_ms"] > 0
    assert chunk["num_measured_captures"] == chunk["num_captures_after_first"] == 0
    assert chunk["is_deterministic"] is True


def _check_waste(result: dict[str, Any], num_data_ranks: int, num_saved: int) -> None:
    """Check the padding; buckets leave out ``num_saved`` rows."""
    steps = _documents(num_data_ranks)
    num_tokens = sum(sum(lengths) for step in steps for lengths in step)
    num_rows = _TOKENS * sum(map(len, steps)) - num_saved
    for variant in ("eager", "chunk"):
        waste = result[variant]["padding_waste"]
        assert waste == pytest.approx(1 - num_tokens / num_rows), variant


# Not for each release of Megatron: tests of packed training cover their differences.
def test_in_a_pipeline(run_cases: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    pipeline = {"pipeline_model_parallel_size": 2}
    case = _case(make_config, pipeline=pipeline, packing={"buckets": [36]})
    result = run_cases({"buckets": case}, 2)["buckets"]
    _check(result, 1)
    short = [n for step in _documents(1) for n in step if sum(n) <= 36 and len(n) < _SEQS]
    assert short
    _check_waste(result, 1, (_TOKENS - 36) * len(short))


@pytest.mark.megatron
@pytest.mark.slow
def test_where_only_one_of_two_ranks_has_too_many(
    run_cases: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    """Both run the step eagerly; it counts once, under the cause that one of them knows."""
    case = _case(make_config, pipeline={"data_parallel_size": 2})
    result = run_cases({"dp2": case}, 2)["dp2"]
    _check(result, 2)
    _check_waste(result, 2, 0)
