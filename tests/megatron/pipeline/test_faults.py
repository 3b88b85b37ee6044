"""Faults under a zero-bubble schedule: all ranks decide alike, and nothing hangs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]

ZB = {"pipeline_model_parallel_size": 2, "schedule": "zb-h1"}
STEPS = [{"num_microbatches": m} for m in (2, 3, 1)]


@pytest.fixture
def case(make_config: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def make(
        steps: list[dict[str, Any]],
        capture: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        **fault: Any,
    ) -> dict[str, Any]:
        config = make_config(
            model={"hidden_dropout": 0.1, **(model or {})}, pipeline=ZB, capture=capture or {}
        )
        return {"config": config, "probe": "fault", "steps": steps, **fault}

    return make


@pytest.mark.slow
def test_faults_of_one_rank(
    run_cases: Callable[..., dict[str, Any]], case: Callable[..., dict[str, Any]]
) -> None:
    watchful = {"layer_spec": "user_specs:watchful_where_faulty"}
    mixed = [*STEPS, {"num_microbatches": 2, "evaluates": True}, {"num_microbatches": 4}]
    results = run_cases(
        {
            "fails": case(STEPS, {"on_failure": "eager"}, watchful, layer_fails=True),
            "in_capture": case(STEPS, signalled="capture"),
            "in_replay": case([*STEPS, *STEPS], signalled="replay"),
            "mixed": case(mixed, {"scope": "chunk"}),
        },
        2,
        timeout_s=200,
    )
    for name, ranks in results.items():
        for rank in ranks:
            assert rank["error"] == "", name
            assert all(rank["losses_equal"]), name
            assert rank["state_equal"], name
            assert rank["sessions"] == (name != "fails"), name
    for rank in results["fails"]:
        assert rank["fallbacks"] == {"capture warmup": 1, "capture failed": 2}
        assert rank["replays"] == 0
    for name in ("in_capture", "in_replay"):
        # Both ranks finish the step, and then stop together.
        assert [rank["num_done"] for rank in results[name]] == [2, 2]
        assert [rank["replays"] for rank in results[name]] == [3, 3]
    for rank in results["mixed"]:
        assert rank["fallbacks"] == {"capture warmup": 1, "forward only": 1}
        assert rank["replays"] == 3 + 1 + 4


def test_a_rank_killed_in_a_replayed_step(
    run_to_its_end: Callable[..., Any], case: Callable[..., dict[str, Any]]
) -> None:
    fault = {"signalled": "replay", "signal": int(signal.SIGKILL)}
    codes, messages = run_to_its_end(case([*STEPS, *STEPS], **fault))
    assert codes == [1, -signal.SIGKILL]
    assert "Rank 0 stopped because another rank ended" in messages[0]
