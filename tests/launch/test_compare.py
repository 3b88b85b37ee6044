"""``chunkgraph launch --compare``, and what a normal run tells about its steps, on a CPU."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch_arguments import arguments
from training_needs import NEEDS_TRAINING

from chunkgraph.megatron.cpu.pretrain import cpu_pretrain_host

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"
FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --position-embedding-type rope --micro-batch-size 2 "
    "--global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data "
    "--num-workers 0 --log-interval 1 --lr 1e-3 --lr-decay-style constant --eval-iters 1 "
    "--hidden-dropout 0.1 --data-cache-path cache"
)

pytestmark = [pytest.mark.megatron, NEEDS_TRAINING]


def steps_of(path: Path) -> list[list[str]]:
    """Return the losses and gradient norms of an exact log."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[*re.findall(r"'lm loss': '(\S+)'", line), line.split()[1]] for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_command_line_is_compared_and_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    more = "--pipeline-model-parallel-size 2 --train-iters 3 --exit-interval 2 --exact-log steps "
    more += "--save saved --save-interval 1 --eval-interval 2 --cuda-graph-verify poison"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "chunkgraph.cli", "launch", "--device", "cpu"),
            *("--nproc-per-node", "2", "--compare", "2", "--json", "result.json"),
            *(str(SCRIPT), *FLAGS, *more.split()),
        ],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    document = json.loads((tmp_path / "result.json").read_text())
    eager, chunk = document["runs"]
    # 3 + 2 steps for captures, 2 that are measured, 2 that are traced; chunk runs first.
    logs = [steps_of(tmp_path / f"steps.rank{rank}") for rank in range(2)]
    by_step = [first + last for first, last in zip(*logs, strict=True)]
    assert len(by_step) == 18
    assert chunk["values"] == by_step[:9]
    assert eager["values"] == by_step[9:] == by_step[:9]
    assert len({tuple(values) for values in eager["values"]}) == 9
    for run in (eager, chunk):
        assert len(run["step_ms"]) == 2
        assert min(run["step_ms"]) > 0
    assert eager["capture_ms"] == 0 < chunk["capture_ms"]
    assert "chunk: all losses and gradient norms equal eager ones to the last bit." in done.stdout
    assert "9/9" in done.stdout
    assert done.stdout.count("graph replays:     4 |") == 8
    assert "validation loss" not in done.stdout
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("run", ["eager", "chunk", "local"])
@pytest.mark.parametrize("num_iters", [None, 3, 99])
def test_the_arguments_of_a_run(run: str, num_iters: int | None, tmp_path: Path) -> None:
    with cpu_pretrain_host():
        from chunkgraph.launch.step_records import StepRecorder

        hooks: Any = SimpleNamespace(parsed=lambda _: None, graphs=None)
        recorder = StepRecorder(hooks, run=run, num_steps=4, folder=str(tmp_path))
        args = arguments(
            cuda_graph_impl="transformer_engine",
            cuda_graph_verify="poison",
            train_iters=num_iters,
            save="saved",
            optimizer_cuda_graph=True,
            full_validation=True,
        )
        hooks.parsed(args)
        recorder.close()
    # 3 + 2 steps for captures, 4 that are measured, 2 that are traced.
    assert args.train_iters == (num_iters and max(num_iters, 11))
    assert args.save is None
    assert not args.full_validation  # of a whole data set, whatever the number of steps
    assert not args.optimizer_cuda_graph
    assert args.chunkgraph == (run == "chunk")
    if run == "chunk":
        assert args.cuda_graph_verify == "poison"
    else:
        assert (args.cuda_graph_granularity, args.cuda_graph_verify) == ("layer", None)
        assert args.cuda_graph_impl == {"eager": "none"}.get(run, run)


def test_a_step_lasts_until_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eager device waits for what the host does between two steps."""
    monkeypatch.setenv("RANK", "0")
    with cpu_pretrain_host():
        from chunkgraph.launch.step_records import StepRecorder

        hooks: Any = SimpleNamespace(parsed=lambda _: None, graphs=None)
        recorder = StepRecorder(hooks, run="eager", num_steps=4, folder=str(tmp_path))
        hooks.parsed(arguments(train_iters=None))
        recorder._train = lambda: ({}, 0, False, False, 0, 1.0)
        recorder._get_args = lambda: SimpleNamespace(curr_iteration=0)
        for _ in range(3 + 2 + 4 + 2):
            recorder._train_step()
            time.sleep(0.01)
        recorder.close()
    record = json.loads((tmp_path / "rank0.json").read_text())
    assert len(record["step_ms"]) == 4
    assert min(record["step_ms"]) >= 10


@pytest.mark.slow
def test_a_normal_run_tells_what_a_step_takes(
    tmp_path: Path, run_ranks: Callable[..., tuple[list[int], str]]
) -> None:
    more = ["--train-iters", "26", "--eval-interval", "100", "--chunkgraph"]
    more += ["--data-cache-path", str(tmp_path / "cache")]
    codes, output = run_ranks([str(SCRIPT), *FLAGS, *more], 1, tmp_path)
    assert codes == [0], output[-4000:]
    lines = output.splitlines()
    (told,) = [i for i, line in enumerate(lines) if "a replayed step takes" in line]
    assert re.search(r"iteration +21/", "".join(lines[:told]))
    assert not re.search(r"iteration +22/", "".join(lines[:told]))
    assert "--cross-entropy-loss-fusion saves passes over all logits" in lines[told]
    took = float(lines[told].split(" takes ")[1].split()[0])
    logged = re.findall(r"elapsed time per iteration \(ms\): (\S+)", output)[1:21]
    assert min(map(float, logged)) <= took <= max(map(float, logged))
