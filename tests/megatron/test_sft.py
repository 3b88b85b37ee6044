"""Megatron's ``pretrain()`` on packed ``--sft`` data, with and without chunk graphs."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "scripts" / "pretrain_gpt.py"

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(
        sys.version_info < (3, 12)
        or importlib.util.find_spec("megatron.training") is None
        or importlib.util.find_spec("psutil") is None,
        reason="megatron.training of megatron-core 0.19, which needs Python 3.12 and psutil",
    ),
]

ROWS = 24
MODEL = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", str(ROWS), "--max-position-embeddings", str(ROWS)),
    *("--position-embedding-type", "rope", "--spec", "packed_spec", "packed_layer"),
    *("--sft", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64", "--split", "90,10,0"),
    *("--num-workers", "0", "--lr", "1e-3", "--lr-decay-style", "constant"),
    *("--log-interval", "1", "--eval-iters", "1", "--micro-batch-size", "1"),
    *("--no-create-attention-mask-in-dataloader", "--attention-dropout", "0.1"),
    *("--global-batch-size", "4", "--pipeline-model-parallel-size", "2"),
]
CHUNK = ["--cuda-graph-granularity", "chunk", "--cuda-graph-warmup-steps", "1"]
STEPS = ["--train-iters", "6", "--eval-interval", "4", "--hidden-dropout", "0.1"]


def _sample(generator: random.Random, lengths: Sequence[int]) -> str:
    """A line of the file: conversations of so many tokens, of which the second half are learned."""
    messages = []
    for length in lengths:
        numbers = [str(generator.randrange(62)) for _ in range(length)]
        half = length // 2
        messages.append({"role": "system", "content": " ".join(numbers[:half])})
        messages.append({"role": "assistant", "content": " ".join(numbers[half:])})
    return json.dumps({"messages": messages})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of 2 to 4 documents; that of number 13, in the fourth step, has 7."""
    generator = random.Random(5)
    path = tmp_path_factory.mktemp("sft") / "conversations.jsonl"
    lines = []
    for number in range(80):
        most = 9 if number % 4 else 4  # the first of each step is short
        lengths = [generator.randint(2, most) for _ in range(generator.randint(2, 4))]
        lines.append(_sample(generator, [3] * 7 if number == 13 else lengths))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


class Runs:
    """Runs of one script on one file of conversations."""

    def __init__(
        self, folder: Path, data: Path, run_ranks: Callable[..., tuple[list[int], str]]
    ) -> None:
        self.folder = folder
        self.output = ""
        self._data = data
        self._run_ranks = run_ranks

    def train(self, name: str, *flags: str, nproc: int = 2) -> list[str]:
        """The exact log of the last rank."""
        codes = self.end(name, *flags, nproc=nproc)
        assert codes == [0] * nproc, self.output[-6000:]
        log = self.folder / f"{name}.rank{nproc - 1}"
        return log.read_text(encoding="utf-8").splitlines()

    def end(self, name: str, *flags: str, nproc: int = 2) -> list[int]:
        """The exit codes of all ranks."""
        arguments = [str(HERE / "sft_stand_ins.py"), str(SCRIPT), *MODEL]
        arguments += ["--data-path", str(self._data)]
        arguments += ["--exact-log", str(self.folder / name), *flags]
        codes, self.output = self._run_ranks(arguments, nproc, self.folder)
        return codes

    def reads(self, name: str, nproc: int = 2) -> list[list[str]]:
        """What each rank read, in order."""
        files = [self.folder / f"{name}.reads.rank{rank}" for rank in range(nproc)]
        return [file.read_text(encoding="utf-8").splitlines() for file in files]

    def replays(self) -> list[int]:
        """Of each step of the last run."""
        return [int(n) for n in re.findall(r"graph replays: +(\d+)", self.output)]


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    data: Path,
    run_ranks: Callable[..., tuple[list[int], str]],
) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), data, run_ranks)


@pytest.fixture(scope="module")
def eager(runs: Runs) -> list[str]:
    return runs.train("eager", *STEPS)


def test_pp2_equals_eager(runs: Runs, eager: list[str]) -> None:
    log = runs.train("chunk", *STEPS, *CHUNK, "--cuda-graph-max-packed-seqs", "7")
    assert runs.replays() == [0, 4, 4, 0, 4, 4]
    assert log == eager
