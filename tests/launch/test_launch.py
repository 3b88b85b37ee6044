"""Megatron's ``pretrain()`` on CPU processes, with and without chunk graphs, end to end."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from training_needs import NEEDS_TRAINING

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"

pytestmark = [
    pytest.mark.megatron,
    NEEDS_TRAINING,
]

MODEL = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--micro-batch-size", "2"),
    *("--position-embedding-type", "rope", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "63", "--mock-data", "--num-workers", "0", "--log-interval", "1"),
    *("--lr", "1e-3", "--lr-decay-style", "constant"),  # otherwise it is 0 from the third step on
    *("--eval-iters", "1", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"),
    *("--pipeline-model-parallel-size", "2"),
]
# Microbatches of a step: 2, 2, 3, 3, 4, 4 (thresholds in tokens). The loss scale grows after every
# second good step, until gradients overflow, a step is skipped and it shrinks.
STEPS = ["--step-batch-size-schedule", "0:4 128:6 320:8", "--train-iters", "6"]
STEPS += ["--eval-interval", "2"]
STEPS += ["--fp16", "--initial-loss-scale", "524288", "--hysteresis", "1"]
STEPS += ["--loss-scale-window", "2"]
CHUNK = ["--cuda-graph-impl", "local", "--cuda-graph-granularity", "chunk"]
CHUNK += ["--cuda-graph-warmup-steps", "1"]
EIGHT = ["--global-batch-size", "8"]


class Jobs:
    """Runs of the launcher in a shared folder, and the output of the last one."""

    def __init__(self, folder: Path, run_ranks: Callable[..., tuple[list[int], str]]) -> None:
        self.folder = folder
        self.output = ""
        self._run_ranks = run_ranks

    def start(self, *flags: str, script: Path = SCRIPT, nproc: int = 2) -> subprocess.Popen[str]:
        """Start ``chunkgraph launch``, which starts the ranks."""
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "chunkgraph.cli", "launch"),
                *("--device", "cpu", "--nproc-per-node", str(nproc), str(script)),
                *flags,
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "PYTHONWARNINGS": "ignore",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            start_new_session=True,
        )

    def end(self, *flags: str, script: Path = SCRIPT, nproc: int = 2) -> list[int]:
        """Return the exit codes of ranks that are forked, which is quicker than torchrun."""
        codes, self.output = self._run_ranks([str(script), *flags], nproc, self.folder)
        return codes

    def train(self, name: str, *flags: str, script: Path = SCRIPT, nproc: int = 2) -> list[str]:
        """Return the exact log of the last rank; the run must succeed."""
        arguments = [*MODEL, "--data-cache-path", str(self.folder / "cache")]
        arguments += ["--exact-log", str(self.folder / name), *flags]
        codes = self.end(*arguments, script=script, nproc=nproc)
        assert codes == [0] * nproc, self.output[-6000:]
        log = self.folder / f"{name}.rank{nproc - 1}"
        return log.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., tuple[list[int], str]]
) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("launch"), run_ranks)


@pytest.fixture(scope="module")
def eager(jobs: Jobs) -> list[str]:
    log = jobs.train("eager", *STEPS, "--cuda-graph-granularity", "layer")
    assert len(log) == 6
    assert "chunk graphs" not in jobs.output
    scales = [float.fromhex(line.split()[2]) for line in log]
    assert 2 * min(scales) <= max(scales)  # some steps were skipped
    return [*log, *_evaluations(jobs.output)]


@pytest.fixture
def wait_for_line() -> Callable[[subprocess.Popen[str], str], list[str]]:
    def wait(process: subprocess.Popen[str], pattern: str) -> list[str]:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if re.search(pattern, line):
                return lines
        raise AssertionError("".join(lines)[-4000:])

    return wait


def _evaluations(output: str) -> list[str]:
    return re.findall(r"validation loss at iteration \d+ .*lm loss value: \S+", output)


def _num_zeros(output: str) -> list[str]:
    return re.findall(r"num zeros: (\S+) ", output)


def _replays(output: str) -> list[int]:
    return [int(n) for n in re.findall(r"graph replays: +(\d+)", output)]


@pytest.mark.slow
def test_pp2_saved_resumed_and_with_other_counts_equals_eager(jobs: Jobs, eager: list[str]) -> None:
    save = jobs.folder / "checkpoint"
    flags = [*STEPS, *CHUNK]
    saving = ["--save", str(save), "--save-interval", "100"]
    first = jobs.train("chunk", *flags, *saving, "--exit-interval", "3")
    assert len(first) == 3
    assert _replays(jobs.output) == [0, 2, 3]
    assert "eager steps (forward only): 1" in jobs.output  # the evaluation after step 2
    assert "captured 4 graphs, 2 slots on rank 0" in jobs.output
    evaluations = _evaluations(jobs.output)
    both = jobs.train("chunk", *flags, "--load", str(save))
    assert _replays(jobs.output) == [0, 4, 4]
    evaluations += _evaluations(jobs.output)
    assert len(evaluations) >= 3
    assert [*both, *evaluations] == eager


@pytest.mark.slow
def test_dp2_pp2_vpp2_with_overlaps_and_whole_chunks_equals_eager(jobs: Jobs) -> None:
    flags = [
        *EIGHT,
        *[
            "--train-iters",
            "3",
            "--eval-interval",
            "10",
            "--num-virtual-stages-per-pipeline-rank",
            "2",
        ],
        *["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
        "--log-num-zeros-in-grad",
    ]
    eager = jobs.train("vpp-eager", *flags, nproc=4)
    num_zeros = _num_zeros(jobs.output)
    assert len(num_zeros) == 3
    tensorboard = ["--tensorboard-dir", str(jobs.folder / "tb")] if _has_tensorboard() else []
    poisoned = ["--cuda-graph-chunk-scope", "chunk", "--cuda-graph-verify", "poison"]
    arguments = [*flags, *CHUNK, *poisoned, *tensorboard, "--nvtx-ranges"]
    arguments += ["--disable-gloo-process-groups"]  # ranks agree all the same
    chunk = jobs.train("vpp-chunk", *arguments, nproc=4)
    assert chunk == eager
    assert _num_zeros(jobs.output) == num_zeros  # the host reads them for the log
    assert _replays(jobs.output) == [0, 4, 4]  # 2 microbatches in 2 chunks
    if tensorboard:
        scalars = _scalars(jobs.folder / "tb")
        assert scalars["chunk-graphs/replays"] == [0.0, 4.0, 4.0]
        assert scalars["chunk-graphs/eager-steps/capture warmup"] == [1.0, 0.0, 0.0]
        for name in ("capture-seconds", "pool-bytes"):
            before, *after = scalars[f"chunk-graphs/{name}"]
            assert before == 0 < min(after)


@pytest.fixture
def delayed_layers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return flags of layers that delay weight gradients."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support"))
    return ["--spec", "delayed_layers", "delaying_layer"]


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_zero_bubble_equals_megatrons_1f1b(jobs: Jobs, delayed_layers: list[str]) -> None:
    flags = [*delayed_layers, *STEPS]
    expected = [*jobs.train("zb-eager", *flags), *_evaluations(jobs.output)]
    assert len({line.split()[2] for line in expected[:6]}) > 1  # loss scales
    flags += ["--pipeline-schedule", "zb-h1"]
    assert [*jobs.train("zb-driven", *flags), *_evaluations(jobs.output)] == expected
    assert "graph replays" not in jobs.output
    replayed = jobs.train("zb-replayed", *flags, *CHUNK)
    assert [*replayed, *_evaluations(jobs.output)] == expected
    # 2 slots in 2 graphs (the first stage has no input gradient).
    assert "captured 4 graphs, 2 slots on rank 0" in jobs.output
    assert _replays(jobs.output) == [0, 2, 3, 3, 4, 4]


@pytest.mark.slow
def test_overlapped_transfers_of_experts_are_off_and_named(jobs: Jobs) -> None:
    experts = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --bf16 "
    experts += "--expert-model-parallel-size 2 --pipeline-model-parallel-size 1 --num-layers 2 "
    experts += "--untie-embeddings-and-output-weights --disable-bias-linear --swiglu "
    experts += "--train-iters 3 --eval-interval 2"
    flags = [*experts.split(), *EIGHT, "--overlap-moe-expert-parallel-comm"]
    eager = jobs.train("transfers-eager", *flags)
    chunk = jobs.train("transfers-chunk", *flags, *CHUNK)
    assert chunk == eager
    line = "chunk graphs: training runs without --overlap-moe-expert-parallel-comm, with the same"
    assert jobs.output.count(line) == 1
    rows = re.findall(r"experts: dispatch all-to-all, GEMM .*, room for (\d+) rows", jobs.output)
    # At most both experts of each of 32 tokens, from each of two ranks.
    assert [64 <= int(number) <= 128 for number in rows] == [True]
    assert _replays(jobs.output)[-1] > 0


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _scalars(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def test_capture_that_fails_on_one_rank_leaves_all_ranks_eager(
    jobs: Jobs, eager: list[str]
) -> None:
    script = jobs.folder / "faulty.py"
    script.write_text(_FAULTY.format(script=str(SCRIPT)), encoding="utf-8")
    flags = [*STEPS, *CHUNK, "--exit-interval", "3", "--cuda-graph-on-failure", "eager"]
    assert jobs.train("faulty", *flags, script=script) == eager[:3]
    assert jobs.output.count("Training continues eagerly on all ranks") == 1
    warning = jobs.output[jobs.output.index("UserWarning: ") :]
    assert "torch.Tensor.item" in warning
    assert "capturing rank 1, pipeline stage 1" in warning
    assert re.search(r"faulty.py:\d+, in reads_a_value: hidden_states.sum\(\).item\(\)", warning)
    assert "eager steps (capture failed)" in jobs.output


_FAULTY = """
import os, runpy, sys
from megatron.core.transformer.mlp import MLP

forward = MLP.forward

def reads_a_value(self, hidden_states, *args, **kwargs):
    if os.environ["RANK"] == "1":
        hidden_states.sum().item()
    return forward(self, hidden_states, *args, **kwargs)

MLP.forward = reads_a_value
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_sigterm_saves_and_ends_well(
    jobs: Jobs, wait_for_line: Callable[[subprocess.Popen[str], str], list[str]]
) -> None:
    save = jobs.folder / "terminated"
    script = jobs.folder / "small_data.py"
    script.write_text(_SMALL_DATA.format(script=str(SCRIPT)), encoding="utf-8")
    process = jobs.start(
        *(*MODEL, "--global-batch-size", "4", "--num-layers", "2", *CHUNK),
        *("--pipeline-model-parallel-size", "1"),
        *("--exit-signal-handler", "--train-iters", "2000"),
        *("--eval-interval", "100000", "--save", str(save), "--save-interval", "100000"),
        *("--ckpt-format", "torch"),  # this format starts no process; the other one is saved above
        script=script,
        nproc=1,
    )
    try:
        wait_for_line(process, r"iteration +3/")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output[-4000:]
        saved = int((save / "latest_checkpointed_iteration.txt").read_text())
        assert saved >= 3
    finally:
        process.kill()


_SMALL_DATA = """
import runpy
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

MockGPTLowLevelDataset.size = 2000  # an index of all mock data takes seconds
runpy.run_path({script!r}, run_name="__main__")
"""
