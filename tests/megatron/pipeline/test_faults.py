"""Faults under a zero-bubble schedule: all ranks decide alike, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from faulty_cases import STEPS, faulty_case, one_rank_is_killed

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]


@pytest.fixture
def case(make_config: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return partial(faulty_case, make_config, schedule="zb-h1")


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
    one_rank_is_killed(run_to_its_end, case)
