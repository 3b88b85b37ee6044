"""Runs a pretrain script on ``--sft`` data: ``sft_stand_ins.py SCRIPT FLAGS``.

Megatron's SFTDataset reads its file with the package ``datasets`` and tokenizes conversations with
``transformers``. Packing of documents needs neither, so stand-ins replace both: a message is a list
of numbers, its tokens.

``SFT_READS`` names a file that gets a line for each sample that is read, with the number of its
data set. ``SFT_RERUN`` is the number of a step that Megatron's rerun state machine runs again.
``SFT_WORDS`` names a file that gets a line for each announcement of a step, and for each question
about one: whether it was posted before.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


class NumberTokenizer:
    """The part of a tokenizer that SFTDataset and Megatron use."""

    eod = 62
    pad = 63
    vocab_size = 64
    unique_identifiers = {"class": "NumberTokenizer"}  # noqa: RUF012

    def tokenize_conversation(
        self, conversation: list[dict[str, str]], return_target: bool, **_: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all messages, and those of the assistant as targets."""
        assert return_target
        tokens, targets = [], []
        for message in conversation:
            numbers = [int(number) for number in message["content"].split()]
            tokens += numbers
            targets += numbers if message["role"] == "assistant" else [-100] * len(numbers)
        return np.array(tokens, dtype=np.int64), np.array(targets, dtype=np.int64)


def load_dataset(_kind: str, *, data_files: str, split: str) -> list[dict[str, Any]]:
    """Return all lines of a file."""
    assert split == "all"
    text = Path(data_files).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def main(script: str) -> None:
    """Install the stand-ins and run the script unchanged."""
    from megatron.core.tokenizers.utils import build_tokenizer
    from megatron.training.datasets.sft_dataset import SFTDataset

    package = ModuleType("datasets")
    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    sys.modules["datasets"] = package

    def build(args: Any, **_: Any) -> NumberTokenizer:
        args.padded_vocab_size = NumberTokenizer.vocab_size
        return NumberTokenizer()

    build_tokenizer.build_tokenizer = build
    for name in ("megatron.training.global_vars", "megatron.training.training"):
        if hasattr(sys.modules.get(name), "build_tokenizer"):
            sys.modules[name].build_tokenizer = build
    path = os.environ.get("SFT_READS")
    if path:
        get = SFTDataset.__getitem__
        numbers: dict[int, int] = {}  # data sets in the order of their first reads

        def read(self: Any, index: int) -> Any:
            number = numbers.setdefault(id(self), len(numbers))
            with open(f"{path}.rank{os.environ['RANK']}", "a", encoding="utf-8") as file:
                file.write(f"{self.index_split.name} {number}: {index}\n")
            return get(self, index)

        SFTDataset.__getitem__ = read
    if "SFT_WORDS" in os.environ:
        write_words(f"{os.environ['SFT_WORDS']}.rank{os.environ['RANK']}")
    if "SFT_STASH_BYTES" in os.environ:
        from chunkgraph.launch import flags

        class SmallStash(flags.StashConfig):
            initial_bytes: int | None = int(os.environ["SFT_STASH_BYTES"])

        class SmallFlags(flags.GraphFlags):
            stash: SmallStash = SmallStash()

        flags.GraphFlags = SmallFlags  # type: ignore[misc]
    if "SFT_RANDOM_SIZES" in os.environ:
        choose_sizes_at_random()
    if "SFT_RERUN" in os.environ:
        run_again(int(os.environ["SFT_RERUN"]))
    runpy.run_path(script, run_name="__main__")


def choose_sizes_at_random() -> None:
    """Let groups of all sizes have microbatches, also where a smaller size would do."""
    from context_sizes import RandomSizes

    from chunkgraph.launch import packed_steps

    schedule = packed_steps.schedule_contexts

    def at_random(lengths: Any, limits: Any, _: Any) -> Any:
        return schedule(lengths, limits, RandomSizes(str(lengths), limits.max_packed_seqs - 1))

    packed_steps.schedule_contexts = at_random


def write_words(path: str) -> None:
    """Record announcements of steps to the engine, and its questions about them."""
    from chunkgraph.engine import ChunkGraphs, StepPlan
    from chunkgraph.engine.agreement import Agreement

    announce, withdraw, answer = ChunkGraphs.announce, ChunkGraphs.withdraw, Agreement.answer

    def write(word: str) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{word}\n")

    def announced(self: Any, plan: StepPlan) -> None:
        write(f"announced {plan.misfit or 'fits'}")
        announce(self, plan)

    def withdrawn(self: Any) -> None:
        write("withdrawn")
        withdraw(self)

    def answered(self: Any, values: Any) -> Any:
        posted = self._posted
        write("posted before" if posted is not None and posted[0] == values else "asks")
        return answer(self, values)

    ChunkGraphs.announce, ChunkGraphs.withdraw = announced, withdrawn
    Agreement.answer = answered


def run_again(number: int) -> None:
    """Have Megatron run a step again, as after a suspicious loss, and accept its result."""
    from megatron.core.rerun_state_machine import RerunState, RerunStateMachine

    ask = RerunStateMachine.should_run_forward_backward
    num_begun = 0

    def should_run_forward_backward(self: Any, data_iterator: Any) -> bool:
        nonlocal num_begun
        begins = self.state == RerunState.NOT_RUNNING_YET
        runs = ask(self, data_iterator)
        if begins:
            num_begun += 1
            self.rerun_requested = self.continue_requested = num_begun == number
        return runs

    RerunStateMachine.should_run_forward_backward = should_run_forward_backward


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
