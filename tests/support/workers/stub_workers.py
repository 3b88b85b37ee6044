"""Stand-ins for the training worker: each behaves in one way, without torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from chunkgraph.errors import CaptureError, ConfigError
from chunkgraph.settings import load_config

RANK = int(os.environ.get("RANK", "0"))


def _report(run_dir: str, event: dict[str, object]) -> None:
    (Path(run_dir) / f"pid{RANK}").write_text(str(os.getpid()))
    if RANK == 0:
        with (Path(run_dir) / "progress.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")


def _step(step: int, count: int, num_steps: int, phase: str) -> dict[str, object]:
    return {
        "phase": phase,
        "step": step,
        "num_steps": num_steps,
        "loss": 5.5,
        "num_microbatches": count,
        "event": "step",
    }


def _succeed(config_path: str, run_dir: str, **changes: object) -> int:
    counts = load_config(config_path).train.num_microbatches
    for phase in ("eager", "chunk"):
        for step, count in enumerate(counts):
            _report(run_dir, _step(step, count, len(counts), phase))
    if RANK == 0:
        steps = [
            {
                "step": step,
                "num_microbatches": count,
                "loss_chunk": 5.123456789,
                "loss_chunk_hex": (5.123456789).hex(),
                "loss_eager": 5.123456789,
                "grad_norm_chunk": 1.25,
                "grad_norm_eager": 1.25,
                "loss_equal": True,
                "grad_norm_equal": True,
                "captures": 6 if step == 1 else 0,
                "replays": count if step else 0,
                "fallbacks": {} if step else {"capture warmup": 1},
                "step_ms_chunk": 10.0,
                "step_ms_eager": 20.0,
            }
            for step, count in enumerate(counts)
        ]
        results = {
            "versions": {},
            "steps": steps,
            "parameters_equal": True,
            "num_parameters_compared": 10,
            "capture_sessions": 1,
            "captures_after_first_session": 0,
            "slots_per_chunk": [[2, 1]],
            "num_graphs": 12,
        }
        steps[-1].update(changes.pop("last_step", {}))  # type: ignore[call-overload]
        (Path(run_dir) / "rank0.json").write_text(json.dumps({**results, **changes}))
    # One write: unbuffered, `print` writes the line's end separately, and ranks share the pipe.
    sys.stdout.write(f"hello from [rank {RANK}]\n")
    return 0


def succeed(config_path: str, run_dir: str) -> int:
    return _succeed(config_path, run_dir)


def differ(config_path: str, run_dir: str) -> int:
    return _succeed(
        config_path, run_dir, last_step={"loss_eager": 5.123456788, "loss_equal": False}
    )


def parameters_differ(config_path: str, run_dir: str) -> int:
    return _succeed(config_path, run_dir, parameters_equal=False)


def capture_again(config_path: str, run_dir: str) -> int:
    return _succeed(config_path, run_dir, captures_after_first_session=2)


def write_no_results(config_path: str, run_dir: str) -> int:
    _report(run_dir, {"event": "step", "phase": "eager", "step": 0, "num_steps": 1} | _NUMBERS)
    return 0


_NUMBERS = {"loss": 1.0, "num_microbatches": 1}


def fail(config_path: str, run_dir: str) -> int:
    if RANK == 1:
        raise CaptureError("model.py:12: .item() waits for the device.")
    time.sleep(600)
    return 0


def crash(config_path: str, run_dir: str) -> int:
    if RANK == 1:
        raise ZeroDivisionError("one\n\ntwo")
    time.sleep(600)
    return 0


def refuse(config_path: str, run_dir: str) -> int:
    raise ConfigError("model.layer_spec: cannot import nowhere.")


def exit_silently(config_path: str, run_dir: str) -> int:
    return 7


class CheckpointException(BaseException):
    """Stands for torch's, which is no Exception and whose text is the tracebacks of the ranks."""

    def __init__(self) -> None:
        self.failures = {0: (RuntimeError("unexpected EOF"), None)}

    def __str__(self) -> str:
        return "CheckpointException ranks:dict_keys([0])\nTraceback (most recent call last):"


def load_a_broken_checkpoint(config_path: str, run_dir: str) -> int:
    if RANK == 1:
        raise CheckpointException
    raise RuntimeError("Connection closed by peer")


def be_terminated(config_path: str, run_dir: str) -> int:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
    return 0


def stop(config_path: str, run_dir: str) -> int:
    _report(run_dir, _step(0, 4, 6, "eager"))
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")


def fail_late(config_path: str, run_dir: str) -> int:
    if RANK == 0:
        raise RuntimeError("Connection closed by peer")
    time.sleep(1)
    raise ValueError("no such corpus")


def be_killed(config_path: str, run_dir: str) -> int:
    _report(run_dir, _step(0, 4, 6, "eager"))
    if RANK == 1:
        progress = Path(run_dir) / "progress.jsonl"
        while not (progress.exists() and "eager" in progress.read_text()):  # of rank 0
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return 0


def hang(config_path: str, run_dir: str) -> int:
    _report(run_dir, _step(0, 4, 6, "eager"))
    time.sleep(600)
    return 0
