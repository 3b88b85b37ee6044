"""`run_equal` accepts only jobs that equal eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

NAN = float("nan")


@pytest.fixture
def result() -> dict[str, Any]:
    """Return the result of a job without any difference."""
    equal = {"loss_equal": True, "grad_norm_equal": True, "expert_metrics_equal": True}
    return {
        "steps": [{**equal, "loss_chunk": 1.5, "grad_norm_chunk": 0.25}],
        "different_parameters": {},
        "capture_sessions": 1,
        "captures_after_first_session": 0,
    }


@pytest.fixture
def run_cases(result: dict[str, Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """Stand in for the runner of jobs that `run_equal` uses."""
    return lambda cases, num_ranks: dict.fromkeys(cases, result)


def test_an_equal_job_passes(run_equal: Callable[..., Any], result: dict[str, Any]) -> None:
    assert run_equal({"case": {}}, 1) == {"case": result}


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_equal": False},
        {"grad_norm_equal": False},
        {"expert_metrics_equal": False},
        {"loss_chunk": NAN},
        {"grad_norm_chunk": NAN},
        {"different_parameters": {"rank 0": ["weight"]}},
        {"capture_sessions": 0},
        {"capture_sessions": 2},
        {"captures_after_first_session": 1},
    ],
)
def test_anything_else_fails(
    run_equal: Callable[..., Any], result: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Also NaN on both sides, though equal to the last bit."""
    (step,) = result["steps"]
    for key, value in changes.items():
        (step if key in step else result)[key] = value
    with pytest.raises(AssertionError, match="case"):
        run_equal({"case": {}}, 1)
