"""Cases of `run_cases` in which one of two pipeline ranks fails."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

STEPS = [{"num_microbatches": m} for m in (2, 3, 1)]
_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def faulty_case(
    make_config: Callable[..., dict[str, Any]],
    steps: list[dict[str, Any]],
    capture: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    schedule: str = "auto",
    **fault: Any,
) -> dict[str, Any]:
    """Make a case of `fault_probe` with a fault of the second rank."""
    config = make_config(
        model={**_DROPOUT, **(model or {})},
        pipeline={"pipeline_model_parallel_size": 2, "schedule": schedule},
        capture=capture or {},
    )
    return {"config": config, "probe": "fault", "steps": steps, **fault}


def one_rank_is_killed(
    run_to_its_end: Callable[..., Any], case: Callable[..., dict[str, Any]]
) -> None:
    """Kill the second rank in a replay; check that the first one ends and says why."""
    fault = {"signalled": "replay", "signal": int(signal.SIGKILL)}
    codes, messages = run_to_its_end(case([*STEPS, *STEPS], **fault))
    assert codes == [1, -signal.SIGKILL]
    assert "Rank 0 stopped because another rank ended" in messages[0]
