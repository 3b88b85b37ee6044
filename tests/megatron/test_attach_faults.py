"""An error of one rank within `attach` ends it on all ranks, at once and with the rank's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from expert_cases import EXPERTS

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(120)]


@pytest.mark.slow
def test_all_ranks_get_the_text_of_the_one_that_fails(
    run_cases: Callable[..., Any], make_config: Callable[..., dict[str, Any]]
) -> None:
    pipeline = {"pipeline_model_parallel_size": 2, "schedule": "zb-h1"}
    cases = {
        "pipeline": {
            "probe": "attach_fault",
            "config": make_config(pipeline=pipeline),
            "options": {"schedule": "zb-h1"},
        },
        "experts": {
            "probe": "attach_fault",
            "config": make_config(
                moe={**EXPERTS, "moe_expert_capacity_factor": 2.0},
                pipeline={"expert_model_parallel_size": 2, "data_parallel_size": 2},
            ),
            "options": {"token_drops": "rerun"},
        },
    }
    for of_case in run_cases(cases, 2).values():
        for where, (messages, seconds) in of_case.items():
            text = f"no room for {where.split()[0]}"
            assert messages[1] == text, where
            assert messages[0].endswith(f"another rank cannot go on.\nrank 1: {text}"), where
            assert seconds < 5, where
