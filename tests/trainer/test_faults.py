"""Faults in two processes: all ranks decide alike, nothing hangs, the numbers stay."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(120)]

RunCases = Callable[..., dict[str, Any]]
RunWorker = Callable[..., tuple[list[int], Path]]
MakeConfig = Callable[..., dict[str, Any]]


STEPS = [{"num_microbatches": m} for m in (2, 3, 1)]
_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_WATCHFUL = {"layer_spec": "user_specs:watchful_where_faulty"}


@pytest.fixture
def case(make_config: MakeConfig) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a case of `fault_probe` with a fault of the second rank."""

    def make(
        steps: list[dict[str, Any]],
        capture: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        schedule: str = "auto",
        **fault: Any,
    ) -> dict[str, Any]:
        config = make_config(
            model={**_DROPOUT, **(model or {})},
            pipeline={"pipeline_model_parallel_size": 2, "schedule": schedule},
            capture=capture or {},
        )
        return {"config": config, "probe": "fault", "steps": steps, **fault}

    return make


def line_of(marker: str) -> int:
    text = (Path(__file__).parents[1] / "support" / "user_specs.py").read_text(encoding="utf-8")
    return next(i for i, line in enumerate(text.splitlines(), start=1) if marker in line)


@pytest.mark.slow
def test_faults_of_one_rank(run_cases: RunCases, case: Callable[..., dict[str, Any]]) -> None:
    """On rank 1: a failed capture, lack of memory, SIGTERM; also evaluation and other shapes."""
    eager, shallow = {"on_failure": "eager"}, {"num_layers": 2}
    mixed = [
        *STEPS,
        {"num_microbatches": 2, "evaluates": True},
        {"num_microbatches": 3},
        {"num_microbatches": 2, "seq_length": 8},
        {"num_microbatches": 4},
    ]
    check = {
        "fails": capture_fails,
        "raises": capture_raises,
        "memory": memory_runs_out,
        "in_capture": partial(terminated, when="capture", num_done=2),
        "in_replay": partial(terminated, when="replay", num_done=2),
        "mixed": evaluated,
        "shadow": evaluated,
    }
    cases = {
        "fails": case(STEPS, eager, _WATCHFUL, layer_fails=True),
        "mixed": case(mixed, model=shallow),
        "raises": case(STEPS, {"on_failure": "raise"}, _WATCHFUL, layer_fails=True),
        # One pool serves both graphs: gradients are larger than the memory that the forward frees.
        "memory": case(STEPS, eager, {**shallow, "hidden_size": 256}, limit_bytes=2**20),
        "in_capture": case(STEPS, signalled="capture"),
        "in_replay": case([*STEPS, *STEPS], signalled="replay"),
        "shadow": case(mixed, {"verify": "shadow", "scope": "chunk"}, shallow),
    }
    for name, ranks in run_cases(cases, 2).items():
        check[name](ranks)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_faults_under_a_zero_bubble_schedule(
    run_cases: RunCases, case: Callable[..., dict[str, Any]]
) -> None:
    zero_bubble = partial(case, schedule="zb-h1")
    mixed = [*STEPS, {"num_microbatches": 2, "evaluates": True}, {"num_microbatches": 4}]
    cases = {
        "fails": zero_bubble(STEPS, {"on_failure": "eager"}, _WATCHFUL, layer_fails=True),
        "in_capture": zero_bubble(STEPS, signalled="capture"),
        "in_replay": zero_bubble([*STEPS, *STEPS], signalled="replay"),
        "mixed": zero_bubble(mixed, {"scope": "chunk"}),
    }
    results = run_cases(cases, 2, timeout_s=200)
    trained_eagerly(results["fails"])
    for moment in ("capture", "replay"):
        terminated(results[f"in_{moment}"], when=moment, num_done=2)
    for rank in results["mixed"]:
        assert rank["losses_equal"] == [True] * 5
        assert rank["state_equal"]
        assert (rank["replays"], rank["sessions"], rank["error"]) == (3 + 1 + 4, 1, "")
        assert rank["fallbacks"] == {"capture warmup": 1, "forward only": 1}


def trained_eagerly(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["losses_equal"] == [True] * 3
        assert rank["state_equal"]
        assert rank["fallbacks"] == {"capture warmup": 1, "capture failed": 2}
        assert (rank["replays"], rank["sessions"], rank["error"]) == (0, 0, "")


def capture_fails(ranks: list[dict[str, Any]]) -> None:
    trained_eagerly(ranks)
    assert ranks[0]["warnings"] == []
    (message,) = ranks[1]["warnings"]
    names_the_cause(message)
    assert "Training continues eagerly on all ranks" in message
    assert "another rank could not" in ranks[0]["failure"]
    names_the_cause(ranks[0]["failure"])


def names_the_cause(message: str) -> None:
    assert "rank 1, pipeline stage 1, chunk 0 slot 0 forward" in message
    assert "torch.Tensor.item" in message
    assert re.search(rf"user_specs\.py:{line_of('the line of one rank alone')}\b", message)
    assert "in layer decoder.layers.0\n" in message


def capture_raises(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        names_the_cause(rank["error"])
        assert rank["num_done"] == 1
        assert rank["warnings"] == []
    assert ranks[0]["error"].startswith(
        "rank 0, pipeline stage 0: stopped capturing, since another"
    )


def memory_runs_out(ranks: list[dict[str, Any]]) -> None:
    trained_eagerly(ranks)
    assert ranks[0]["warnings"] == []
    (message,) = ranks[1]["warnings"]
    for words in (
        "Capturing rank 1, pipeline stage 1, chunk 0 slot 0 backward ran out of memory",
        "Tried to allocate 1.00 MiB",
        "0.00 MiB is free",
    ):
        assert words in message, message


def terminated(ranks: list[dict[str, Any]], when: str, num_done: int) -> None:
    """Both ranks finish the step and then stop together, as if to save."""
    assert ranks[0]["handler_ran_in"] == []
    assert ranks[1]["handler_ran_in"] == [when]
    for rank in ranks:
        assert rank["num_done"] == num_done
        assert rank["sessions"] == 1
        assert rank["replays"] == 3
        assert all(rank["losses_equal"])
        assert rank["state_equal"]
        assert rank["error"] == ""


def evaluated(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["error"] == ""
        assert rank["losses_equal"] == [True] * 7
        assert rank["state_equal"]
        assert rank["sessions"] == 1
        assert rank["replays"] == 3 + 1 + 3 + 4
        assert rank["fallbacks"] == {
            "capture warmup": 1,
            "forward only": 1,
            "input shapes differ": 1,
        }


def test_a_shape_changed_without_a_word(
    run_to_its_end: Callable[..., Any], case: Callable[..., dict[str, Any]]
) -> None:
    wrong = {"num_microbatches": 2, "seq_length": 8, "announced": 16}
    codes, messages = run_to_its_end(case([*STEPS, wrong]))
    assert codes == [1, 1]
    assert "rank 0, pipeline stage 0, chunk 0 was called with arguments that differ" in messages[0]
    assert "captured (2, 16) torch.int64 on cpu, called (2, 8)" in messages[0]
    assert "another rank ended" in messages[1]


@pytest.mark.parametrize("schedule", ["auto", "zb-h1"])
def test_a_rank_killed_in_a_replayed_step(
    run_to_its_end: Callable[..., Any], case: Callable[..., dict[str, Any]], schedule: str
) -> None:
    """The first rank ends and says why."""
    fault = {"signalled": "replay", "signal": int(signal.SIGKILL), "schedule": schedule}
    codes, messages = run_to_its_end(case([*STEPS, *STEPS], **fault))
    assert codes == [1, -signal.SIGKILL]
    assert "Rank 0 stopped because another rank ended" in messages[0]


def child_of(parent: int, rank: int) -> int:
    """Return the process id of a rank that ``parent`` started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_rank = f"RANK={rank}\0".encode() in (path / "environ").read_bytes()
            state = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if is_rank and int(state[1]) == parent:
            return int(path.name)
    raise AssertionError(f"rank {rank} does not run")


@pytest.fixture
def start_training(make_config: MakeConfig, tmp_path: Path) -> Callable[..., Any]:
    """Return a starter of a long training with a timeout of 8 s: its launcher, or one rank."""
    config = make_config(
        pipeline={"pipeline_model_parallel_size": 2},
        train={"num_microbatches": [3] * 300, "compare": "none"},
        run={"timeout_s": 8},
    )
    (tmp_path / "config.yaml").write_text(json.dumps(config), encoding="utf-8")

    def start(**variables: str) -> subprocess.Popen[str]:
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        return subprocess.Popen(
            [sys.executable, "-m", "chunkgraph.cli", "train", str(tmp_path / "config.yaml")],
            env={**os.environ, "PYTHONPATH": path, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def last_line_after_stop(job: Any, moment: str, stop: Callable[[], None]) -> str:
    """Stop a rank after a line of the job, and return the job's last line."""
    next(line for line in job.stderr if moment in line)
    stop()
    start = time.monotonic()
    last = job.stderr.read().splitlines()[-1]
    assert time.monotonic() - start < 8 + 30
    assert last.startswith("error: Rank 0 stopped because another rank ended or did not answer")
    return str(last)


@pytest.mark.slow
def test_ranks_without_a_launcher_name_the_one_that_is_stopped(
    start_training: Callable[..., Any], free_port: Callable[[], int]
) -> None:
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [start_training(**job, RANK=str(r), LOCAL_RANK=str(r)) for r in range(2)]
    try:
        stop = partial(ranks[1].send_signal, signal.SIGSTOP)
        last = last_line_after_stop(ranks[0], "step 50/", stop)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert last.endswith("No word from rank 1: stopped, hung or ended.")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("moment", ["processes: ", "step 1/", "chunk graphs: captured", "step 50/"])
def test_a_stopped_rank_is_named_within_the_timeout(
    moment: str, start_training: Callable[..., Any]
) -> None:
    """While processes meet, after the warmup, the capture and a replay."""
    with start_training() as job:
        try:
            last = last_line_after_stop(
                job, moment, lambda: os.kill(child_of(job.pid, 1), signal.SIGSTOP)
            )
        finally:
            job.terminate()
    assert last.endswith("rank 1 by SIGSTOP.")
