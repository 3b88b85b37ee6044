"""Megatron's ``pretrain()`` with ``--pipeline-schedule``, with and without graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from training_needs import NEEDS_TRAINING

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(360),
    NEEDS_TRAINING,
]

MODEL = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--micro-batch-size", "2"),
    *("--position-embedding-type", "rope", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "63", "--mock-data", "--num-workers", "0", "--lr", "1e-3"),
    *("--lr-decay-style", "constant", "--log-interval", "1", "--eval-iters", "1"),
    *("--pipeline-model-parallel-size", "2", "--spec", "delayed_layers", "delaying_layer"),
    *("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--eval-interval", "2"),
]
# The loss scale grows until gradients overflow and a step is skipped.
STEPS = [
    *("--step-batch-size-schedule", "0:4 128:6 320:8", "--train-iters", "6"),
    *("--fp16", "--initial-loss-scale", "524288", "--hysteresis", "1", "--loss-scale-window", "2"),
]
CHUNK = ["--cuda-graph-granularity", "chunk", "--cuda-graph-warmup-steps", "1"]
ZB = ["--pipeline-schedule", "zb-h1"]

Run = Callable[..., tuple[list[str], str]]


@pytest.fixture
def train(
    tmp_path: Path,
    run_ranks: Callable[..., tuple[list[int], str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Train with these flags; return the exact log of the last rank and the output."""
    support = str(Path(__file__).parents[1] / "support")
    monkeypatch.syspath_prepend(support)

    def run(name: str, *flags: str) -> tuple[list[str], str]:
        arguments = [*MODEL, "--data-cache-path", str(tmp_path / "cache")]
        arguments += ["--exact-log", str(tmp_path / name), *flags]
        codes, output = run_ranks([str(SCRIPT), *arguments], 2, tmp_path)
        assert codes == [0, 0], output[-6000:]
        log = (tmp_path / f"{name}.rank1").read_text(encoding="utf-8").splitlines()
        return [*log, *re.findall(r"validation loss at .*lm loss value: \S+", output)], output

    return run


def test_zero_bubble_equals_megatrons_1f1b(train: Run) -> None:
    expected, _ = train("eager", *STEPS)
    scales = {line.split()[2] for line in expected if len(line.split()) > 2}
    assert len(scales) > 1
    driven, output = train("driven", *STEPS, *ZB)
    assert driven == expected
    assert "graph replays" not in output
    replayed, output = train("replayed", *STEPS, *ZB, *CHUNK)
    assert replayed == expected
    # 2 slots in 2 graphs (the first stage has no input gradient).
    assert "captured 4 graphs, 2 slots on rank 0" in output
    assert re.findall(r"graph replays: +(\d+)", output) == ["0", "2", "3", "3", "4", "4"]


@pytest.mark.slow
def test_interleaved_zero_bubble_with_overlap_equals_megatrons_interleaved(train: Run) -> None:
    steps = [*("--global-batch-size", "8", "--train-iters", "3")]
    steps += ["--num-virtual-stages-per-pipeline-rank", "2", "--overlap-grad-reduce"]
    expected, _ = train("eager", *steps)
    flags = [*steps, "--pipeline-schedule", "interleaved-zb"]
    for name, more in {"driven": [], "replayed": CHUNK}.items():
        assert train(name, *flags, *more)[0] == expected
