"""Megatron's ``pretrain()`` on packed ``--sft`` data, with and without chunk graphs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from training_needs import NEEDS_TRAINING

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = SUPPORT.parents[1] / "scripts" / "pretrain_gpt.py"

pytestmark = [
    pytest.mark.megatron,
    NEEDS_TRAINING,
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
    *("--pipeline-model-parallel-size", "2"),
]
CHUNK = ["--cuda-graph-granularity", "chunk", "--cuda-graph-warmup-steps", "1"]
STEPS = ["--train-iters", "6", "--eval-interval", "4", "--hidden-dropout", "0.1"]
STEPS += ["--num-virtual-stages-per-pipeline-rank", "2"]


def _sample(generator: random.Random, lengths: Sequence[int]) -> str:
    """Make a line of the file: conversations of these lengths, with losses in the second halves."""
    messages = []
    for length in lengths:
        numbers = [str(generator.randrange(62)) for _ in range(length)]
        half = length // 2
        messages.append({"role": "system", "content": " ".join(numbers[:half])})
        messages.append({"role": "assistant", "content": " ".join(numbers[half:])})
    return json.dumps({"messages": messages})


def _write(path: Path, most: int, crowded: Sequence[int], seed: int) -> Path:
    """Write samples of 2 to 4 documents of up to ``most`` tokens; those of ``crowded`` have 7."""
    generator = random.Random(seed)
    lines = []
    for number in range(80):
        lengths = [generator.randint(2, most) for _ in range(generator.randint(2, 4))]
        lines.append(_sample(generator, [3] * 7 if number in crowded else lengths))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step has four samples."""
    return _write(tmp_path_factory.mktemp("sft") / "conversations.jsonl", 9, [13], 5)


class Runs:
    """Runs of one script on one file of conversations."""

    def __init__(
        self, folder: Path, data: Path, run_ranks: Callable[..., tuple[list[int], str]]
    ) -> None:
        self.folder = folder
        self.output = ""
        self._data = data
        self._run_ranks = run_ranks

    def train(self, name: str, *flags: str, nproc: int = 2, data: Path | None = None) -> list[str]:
        """Run the script; return the exact log of the last rank."""
        codes = self.end(name, *flags, nproc=nproc, data=data)
        assert codes == [0] * nproc, self.output[-6000:]
        log = self.folder / f"{name}.rank{nproc - 1}"
        return log.read_text(encoding="utf-8").splitlines()

    def end(self, name: str, *flags: str, nproc: int = 2, data: Path | None = None) -> list[int]:
        """Run the script; return the exit codes of all ranks."""
        arguments = [str(SUPPORT / "sft_stand_ins.py"), str(SCRIPT), *MODEL]
        if "--step-batch-size-schedule" not in flags:  # Megatron accepts one of the two
            arguments += ["--global-batch-size", "4"]
        arguments += ["--data-path", str(data or self._data)]
        arguments += ["--exact-log", str(self.folder / name), *flags]
        codes, self.output = self._run_ranks(arguments, nproc, self.folder)
        return codes

    def reads(self, name: str, nproc: int = 2) -> list[dict[str, list[int]]]:
        """Return the indices that each rank read from each of its data sets, in order."""
        indices: list[dict[str, list[int]]] = []
        for rank in range(nproc):
            indices.append({})
            text = (self.folder / f"{name}.reads.rank{rank}").read_text(encoding="utf-8")
            for line in text.splitlines():
                dataset, _, index = line.rpartition(": ")
                indices[-1].setdefault(dataset, []).append(int(index))
        return indices

    def words(self, name: str, nproc: int = 2) -> list[list[str]]:
        """Return each rank's announcements of steps and questions about them, in order."""
        paths = [self.folder / f"{name}.rank{rank}" for rank in range(nproc)]
        return [path.read_text(encoding="utf-8").splitlines() for path in paths]

    def evaluations(self) -> list[str]:
        """Return the losses of the last run's evaluations."""
        return re.findall(r"validation loss at iteration \d+ .*lm loss value: \S+", self.output)

    def replays(self) -> list[int]:
        """Return the number of replays of each step of the last run."""
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFT_READS", str(runs.folder / "eager.reads"))
        patch.setenv("SFT_RERUN", "6")
        log = runs.train("eager", *STEPS)
    assert len(log) == 6
    return [*log, *runs.evaluations()]


SEVEN = ["--cuda-graph-max-packed-seqs", "7"]  # six documents and the rest


@pytest.mark.slow
def test_pp2_vpp2_saved_and_resumed_equals_eager(
    runs: Runs, eager: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, including a step that runs again, and with the same reads in the same order."""
    monkeypatch.setenv("SFT_READS", str(runs.folder / "chunk.reads"))
    monkeypatch.setenv("SFT_WORDS", str(runs.folder / "chunk.words"))
    save = ["--save", str(runs.folder / "checkpoint"), "--save-interval", "100"]
    runs.train("chunk", *STEPS, *CHUNK, *SEVEN, *save, "--exit-interval", "3")
    assert runs.replays() == [0, 8, 8]
    # For two chunks; nothing is read ahead after the last step.
    ahead = ["announced fits", "posted before"]
    assert runs.words("chunk.words") == [["asks", *ahead, *ahead]] * 2
    load = ["--load", str(runs.folder / "checkpoint")]
    monkeypatch.setenv("SFT_RERUN", "3")
    log = runs.train("chunk", *STEPS, *CHUNK, *SEVEN, *load)
    # The fourth step has a microbatch of seven documents, and Megatron runs the sixth again.
    assert runs.replays() == [0, 0, 16]
    assert "eager steps (packing overflow): 1" in runs.output
    assert "eager steps (forward only): 1" in runs.output
    assert log == eager[:6]
    assert runs.evaluations() == eager[6:]
    reads = runs.reads("chunk")
    assert reads == runs.reads("eager")
    for of_rank in reads:  # the first two belong to the two chunks
        assert of_rank["train 0"] == of_rank["train 1"] == list(range(6 * 4))


@pytest.mark.slow
def test_steps_are_announced_before_they_begin(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with changing numbers of microbatches, a step that runs again, and a skipped one."""
    logs = []
    flags = ["--train-samples", "32", "--eval-interval", "2", "--hidden-dropout", "0.1"]
    flags += ["--num-layers", "2", "--iterations-to-skip", "5"]
    # Four microbatches in two steps and six from the third on, of which one has seven documents.
    flags += ["--step-batch-size-schedule", f"0:4 {8 * ROWS}:6"]
    monkeypatch.setenv("SFT_RERUN", "4")
    for name, more in {"ahead-eager": [], "ahead": [*CHUNK, *SEVEN]}.items():
        monkeypatch.setenv("SFT_READS", str(runs.folder / f"{name}.reads"))
        monkeypatch.setenv("SFT_WORDS", str(runs.folder / f"{name}.words"))
        logs.append(runs.train(name, *flags, *more))
    assert logs[1] == logs[0]
    assert runs.reads("ahead") == runs.reads("ahead-eager")
    words = [
        *("asks", "announced fits"),
        *("posted before", "announced fits", "asks"),  # and an evaluation
        *("withdrawn", "asks", "announced fits"),  # another number of microbatches
        *("posted before", "asks", "asks"),  # the fourth, its rerun, and an evaluation
        *("asks", "asks"),  # the sixth and an evaluation; the fifth is skipped
    ]
    assert runs.words("ahead.words") == [words] * 2


@pytest.mark.slow
def test_experts_that_stash_and_run_steps_again_equal_eager(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers count every row, as without the flag: documents fill all rows.

    Pages run out in the first replayed step, which runs again on the same samples.
    """
    flags = ["--train-iters", "5", "--eval-interval", "9", "--hidden-dropout", "0.1"]
    flags += ["--num-layers", "2", "--spec", "packed_spec", "experts_layer", "--num-experts", "4"]
    flags += ["--moe-router-topk", "2", "--moe-expert-capacity-factor", "2.0"]
    flags += ["--moe-pad-expert-input-to-capacity", "--moe-token-dispatcher-type", "alltoall"]
    flags += ["--moe-aux-loss-coeff", "0.01", "--moe-router-load-balancing-type", "seq_aux_loss"]
    flags += ["--disable-bias-linear"]
    monkeypatch.setenv("SFT_STASH_BYTES", "2048")
    stash = ["--cuda-graph-stash", "true", "--cuda-graph-token-drops", "rerun"]
    eager = runs.train("experts-eager", *flags)
    balance = re.findall(r"load_balancing_loss: (\S+)", runs.output)
    assert max(map(float, balance)) > 0
    assert runs.train("experts", *flags, *CHUNK, *SEVEN, *stash) == eager
    assert re.findall(r"load_balancing_loss: (\S+)", runs.output) == balance
    assert runs.output.count("steps run again (stash pages): 1 |") == 1
    assert runs.replays() == [0, 4, 4, 0, 4]
    assert "eager steps (packing overflow): 1" in runs.output


@pytest.mark.slow
def test_tp2_whole_chunks_equal_eager(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first of the tensor-parallel ranks reads data; it informs the other one ahead."""
    flags = ["--train-iters", "4", "--eval-interval", "9", "--hidden-dropout", "0.1"]
    flags += ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "1"]
    flags += ["--num-layers", "2"]
    whole = ["--cuda-graph-chunk-scope", "chunk", "--cuda-graph-verify", "poison"]
    eager = runs.train("tp-eager", *flags)
    monkeypatch.setenv("SFT_WORDS", str(runs.folder / "tp.words"))
    assert runs.train("tp", *flags, *CHUNK, *SEVEN, *whole) == eager
    assert runs.replays() == [0, 4, 4, 0]
    words = ["fits", "fits", "too many documents"]
    ahead = [event for word in words for event in (f"announced {word}", "posted before")]
    assert runs.words("tp.words") == [["asks", *ahead]] * 2


@pytest.mark.slow
def test_cp2_equals_eager(runs: Runs) -> None:
    """Both ranks read the same samples; each works on its pieces of every document."""
    flags = ["--train-iters", "4", "--eval-interval", "9", "--hidden-dropout", "0.1"]
    flags += ["--context-parallel-size", "2", "--pipeline-model-parallel-size", "1"]
    flags += ["--spec", "packed_spec", "split_layer", "--num-layers", "2"]
    five = ["--cuda-graph-max-packed-seqs", "5", "--cuda-graph-verify", "poison"]
    eager = runs.train("cp-eager", *flags)
    assert runs.train("cp", *flags, *CHUNK, *five) == eager
    # The last step has the sample of many documents.
    assert runs.replays() == [0, 4, 4, 0]
    assert "eager steps (packing overflow): 1" in runs.output


@pytest.mark.slow
def test_ranks_share_each_microbatch_as_its_documents_need(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly equal to ranks that share nothing; each replay equals eager, bit for bit.

    A rank has half the rows of a sample. A step that Megatron runs again has the same groups.
    """
    flags = ["--train-iters", "3", "--eval-interval", "2", "--hidden-dropout", "0.0"]
    flags += ["--attention-dropout", "0.0", "--num-virtual-stages-per-pipeline-rank", "2"]
    flags += ["--global-batch-size", "8", "--calculate-per-token-loss"]
    flags += ["--spec", "packed_spec", "contexts_layer"]
    monkeypatch.setenv("SFT_RANDOM_SIZES", "1")
    sizes = ["--cuda-graph-cp-sizes", "1", "2"]
    sizes += ["--cuda-graph-max-packed-tokens", "12", "--cuda-graph-max-packed-seqs", "5"]
    banks = [*CHUNK, *sizes, "--cuda-graph-verify", "shadow"]
    monkeypatch.setenv("SFT_RERUN", "3")
    logs, evaluations = {}, {}
    for name, more in {"own": [], "banks": banks}.items():
        monkeypatch.setenv("SFT_READS", str(runs.folder / f"{name}.reads"))
        logs[name] = _numbers(runs.train(name, *flags, *more, nproc=4))
        evaluations[name] = runs.evaluations()
        assert runs.reads(name, nproc=4) == runs.reads("own", nproc=4)
    assert len(runs.replays()) == 3
    assert all(runs.replays()[1:])
    # Graphs of two sizes, in six slots of two chunks.
    assert "captured 24 graphs" in runs.output
    assert len(evaluations["own"]) == len(evaluations["banks"]) == 2
    assert logs["banks"] != logs["own"]
    assert logs["banks"] == pytest.approx(logs["own"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["pipeline", pytest.param("tensor", marks=pytest.mark.slow)])
def test_ranks_share_microbatches_of_experts(
    runs: Runs, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit equal to the same groups without graphs; experts are on two ranks.

    With tensor parallelism routers count over the groups of `ContextGroups`. In the pipeline, pages
    of the stash run out in the first replayed step, which runs again with the same groups.
    """
    flags = ["--train-iters", "3", "--eval-interval", "2", "--hidden-dropout", "0.1"]
    flags += ["--global-batch-size", "8", "--calculate-per-token-loss"]
    flags += ["--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"]
    flags += ["--moe-expert-capacity-factor", "2.0", "--moe-pad-expert-input-to-capacity"]
    flags += ["--moe-aux-loss-coeff", "0.01", "--moe-router-load-balancing-type", "aux_loss"]
    flags += ["--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "2"]
    chunk = [*CHUNK, "--cuda-graph-verify", "poison"]
    if ranks == "pipeline":
        flags += ["--num-layers", "2", "--spec", "packed_spec", "contexts_experts_layer"]
        monkeypatch.setenv("SFT_STASH_BYTES", "2048")
        chunk += ["--cuda-graph-stash", "true", "--cuda-graph-token-drops", "rerun"]
    else:
        flags += ["--num-layers", "1", "--spec", "packed_spec", "split_contexts_experts_layer"]
        flags += ["--pipeline-model-parallel-size", "1", "--tensor-model-parallel-size", "2"]
        flags += ["--sequence-parallel", "--expert-tensor-parallel-size", "1"]
        chunk += ["--cuda-graph-chunk-scope", "chunk"]
    monkeypatch.setenv("SFT_RANDOM_SIZES", "1")
    sizes = ["--cuda-graph-cp-sizes", "1", "2"]
    sizes += ["--cuda-graph-max-packed-seqs", "5"]
    never = [*CHUNK[:2], "--cuda-graph-warmup-steps", "99"]
    results = {}
    for name, more in {"eager": never, "chunk": chunk}.items():
        log = runs.train(f"{ranks}-{name}", *flags, *more, *sizes, nproc=4)
        balance = re.findall(r"load_balancing_loss: (\S+)", runs.output)
        results[name] = (log, balance, runs.evaluations())
        # 1 is a balanced load, for any number of microbatches.
        assert all(0.97 < float(value) < 1.1 for value in balance), balance
        assert [n > 0 for n in runs.replays()] == [False, *[name == "chunk"] * 2]
    assert results["chunk"] == results["eager"]
    assert runs.output.count("steps run again (stash pages): 1 |") == (ranks == "pipeline")


@pytest.mark.slow
def test_buckets_leave_out_rows_that_no_loss_needs(runs: Runs) -> None:
    """Bit for bit equal to the same rows without graphs, and nearly so to all rows.

    The first and the fourth step do not fit: each has a sample of seven documents. The fourth is
    announced.
    """
    data = _write(runs.folder / "short.jsonl", 5, [2, 13], 7)
    flags = ["--train-iters", "5", "--eval-interval", "9", "--hidden-dropout", "0.0"]
    flags += ["--attention-dropout", "0.0", "--num-layers", "2"]
    tokens = [*SEVEN, "--cuda-graph-max-packed-tokens", "18"]
    tokens += ["--cuda-graph-packed-buckets", "0.5", "14"]
    never = [*CHUNK[:2], "--cuda-graph-warmup-steps", "99"]
    log = runs.train("buckets", *flags, *CHUNK, *tokens, data=data)
    assert runs.replays() == [0, 0, 4, 0, 4]
    # Graphs of three lengths.
    assert "captured 12 graphs" in runs.output
    assert log == runs.train("cut", *flags, *never, *tokens, data=data)
    assert sum(runs.replays()) == 0
    whole = runs.train("whole", *flags, data=data)
    assert log != whole
    assert _numbers(log) == pytest.approx(_numbers(whole), rel=1e-5)


def _numbers(log: Sequence[str]) -> list[float]:
    return [float.fromhex(n) for line in log for n in re.findall(r"0x\S+p[+-]\d+", line)]
