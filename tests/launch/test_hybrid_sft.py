"""Megatron's ``pretrain()`` of a hybrid model on packed ``--sft`` data, with and without graphs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from training_needs import NEEDS_TRAINING

SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(150),
    NEEDS_TRAINING,
]

ROWS = 24
FLAGS = [
    *("--hybrid-layer-pattern", "M|*M-", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--mamba-state-dim", "4", "--mamba-head-dim", "8", "--mamba-num-groups", "2"),
    *("--seq-length", str(ROWS), "--max-position-embeddings", str(ROWS)),
    *("--position-embedding-type", "rope", "--sft", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "64", "--split", "100,0,0", "--num-workers", "0", "--lr", "1e-3"),
    *("--lr-decay-style", "constant", "--log-interval", "1", "--eval-iters", "0"),
    *("--eval-interval", "9", "--no-create-attention-mask-in-dataloader"),
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "3"),
    *("--pipeline-model-parallel-size", "2"),
]
CHUNK = ["--cuda-graph-granularity", "chunk", "--cuda-graph-warmup-steps", "1"]
CHUNK += ["--cuda-graph-max-packed-seqs", "6"]


@pytest.fixture
def train(
    tmp_path: Path, run_ranks: Callable[..., tuple[list[int], str]]
) -> Callable[..., tuple[list[str], str]]:
    """Run with further flags; return the last rank's exact log and the output."""
    letters = random.Random(5)
    lines = []
    for _ in range(20):
        messages = []
        for role in ("system", "assistant") * letters.randint(2, 4):
            numbers = [str(letters.randrange(62)) for _ in range(letters.randint(1, 4))]
            messages.append({"role": role, "content": " ".join(numbers)})
        lines.append(json.dumps({"messages": messages}))
    data = tmp_path / "conversations.jsonl"
    data.write_text("\n".join(lines), encoding="utf-8")

    def run(name: str, *flags: str) -> tuple[list[str], str]:
        arguments = [str(SUPPORT / "sft_stand_ins.py"), str(SUPPORT / "pretrain_hybrid.py"), *FLAGS]
        arguments += ["--data-path", str(data), "--exact-log", str(tmp_path / name), *flags]
        codes, output = run_ranks(arguments, 2, tmp_path)
        assert codes == [0, 0], output[-6000:]
        return (tmp_path / f"{name}.rank1").read_text(encoding="utf-8").splitlines(), output

    return run


def test_pp2_equals_eager(train: Callable[..., tuple[list[str], str]]) -> None:
    eager, _ = train("eager")
    log, output = train("chunk", *CHUNK, "--cuda-graph-chunk-scope", "chunk")
    assert [int(n) for n in re.findall(r"graph replays: +(\d+)", output)] == [0, 2, 2]
    assert len(log) == 3
    assert log == eager
