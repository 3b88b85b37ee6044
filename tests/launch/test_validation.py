"""NaN and Inf in losses and gradients: chunk graphs end a run as eager training does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from training_needs import NEEDS_TRAINING

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.megatron, NEEDS_TRAINING]

FLAGS = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--micro-batch-size", "2"),
    *("--position-embedding-type", "rope", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "63", "--mock-data", "--num-workers", "0", "--log-interval", "1"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--bf16", "--eval-iters", "0"),
    *("--eval-interval", "100"),
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--ckpt-format", "torch"),
    *("--global-batch-size", "8", "--train-iters", "6", "--use-distributed-optimizer"),
]
CHUNK = ["--cuda-graph-impl", "local", "--cuda-graph-granularity", "chunk"]
CHUNK += ["--cuda-graph-warmup-steps", "1"]

_SCRIPT = """
import atexit, hashlib, os, runpy, sys
import torch
from megatron.core.datasets.gpt_dataset import MockGPTDataset, MockGPTLowLevelDataset
from megatron.core.distributed import DistributedDataParallel
from megatron.training import training

MockGPTLowLevelDataset.size = 2000  # an index of all mock data takes seconds
kind, reads, trained = {kind!r}, 0, []
num_samples = num_syncs = 0
read_sample, sync = MockGPTDataset.__getitem__, DistributedDataParallel.finish_grad_sync
step, as_bool = training.train_step, torch.Tensor.__bool__

def sample(data, index):
    global num_samples
    num_samples += 1
    result = read_sample(data, index)
    if kind == "loss" and num_samples == 8 * 3 + 5:  # the third microbatch of the fourth step
        result["loss_mask"] = result["loss_mask"] * float("nan")
    return result

def finish(model, *args, **kwargs):
    global num_syncs
    num_syncs += 1
    if kind == "gradient" and num_syncs == 4:  # it is not there when the step runs again
        next(model.parameters()).main_grad.view(-1)[3] = float("inf")
    return sync(model, *args, **kwargs)

def read(tensor):
    global reads
    reads += 1
    torch.Tensor.__bool__ = as_bool  # the CPU host calls it again
    try:
        return as_bool(tensor)
    finally:
        torch.Tensor.__bool__ = read

def train_step(forward_step, data, model, optimizer, *args, **kwargs):
    global reads
    trained[:] = model, optimizer
    reads = 0
    torch.Tensor.__bool__ = read
    try:
        return step(forward_step, data, model, optimizer, *args, **kwargs)
    finally:
        torch.Tensor.__bool__ = as_bool
        print("checks read:", reads, flush=True)

def state():
    model, optimizer = trained
    tensors = [p for chunk in model for p in chunk.parameters()]
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        params = [p for group in inner.param_groups for p in group["params"]]
        tensors += params + [t for p in params for _, t in sorted(inner.state[p].items())]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(torch.as_tensor(tensor).detach().float().numpy().tobytes())
    return digest.hexdigest()

MockGPTDataset.__getitem__, DistributedDataParallel.finish_grad_sync = sample, finish
training.train_step = train_step
try:
    runpy.run_path({script!r}, run_name="__main__")
finally:
    print("end state of rank", os.environ["RANK"], state(), flush=True)
"""


class Run:
    """Exit codes, end state and messages of a run, and how often the host read in each step."""

    def __init__(self, codes: list[int], output: str) -> None:
        self.codes, self.output = codes, output
        self.states = sorted(re.findall(r"end state of rank \d+ \w+", output))
        self.messages = sorted(
            re.sub(r"node \S+|tensor\(|,? ?(dtype|grad_fn)=[^,)]*|\)", "", line)
            for line in output.splitlines()
            if re.match(r"(ERROR|WARNING):megatron|RuntimeError: Rank|  successfully saved", line)
        )
        self.reads = [int(n) for n in re.findall(r"checks read: (\d+)", output)]


@pytest.fixture
def run(
    tmp_path: Path, run_ranks: Callable[..., tuple[list[int], str]]
) -> Callable[..., tuple[Run, Run]]:
    """Return a runner that trains eagerly and with graphs until a step fails."""

    def both(kind: str, mode: str, num_stages: int) -> tuple[Run, Run]:
        script = tmp_path / "failing.py"
        text = _SCRIPT.format(kind=kind, script=str(ROOT / "scripts" / "pretrain_gpt.py"))
        script.write_text(text, encoding="utf-8")
        flags = [*FLAGS, "--rerun-mode", mode, "--pipeline-model-parallel-size", str(num_stages)]
        flags += ["--data-cache-path", str(tmp_path / "cache"), "--save-interval", "100"]
        runs = []
        for more in ([], CHUNK):
            arguments = [str(script), *flags, "--save", str(tmp_path / "saved"), *more]
            runs.append(Run(*run_ranks(arguments, num_stages, tmp_path)))
        return runs[0], runs[1]

    return both


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("loss", "validate_results"),
        ("gradient", "disabled"),
        pytest.param("loss", "disabled", marks=pytest.mark.slow),
        pytest.param("gradient", "validate_results", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_fails_ends_as_in_eager_training(
    kind: str, mode: str, run: Callable[..., tuple[Run, Run]]
) -> None:
    eager, graphed = run(kind, mode, 1)
    again = {"loss": [16], "gradient": [17]}[kind]  # the gradient is finite when the step repeats
    assert graphed.codes == eager.codes == (again if mode == "validate_results" else [1])
    assert len(eager.messages) >= 1
    assert graphed.messages == eager.messages
    assert graphed.states == eager.states
    assert len(eager.states) == 1
    # Two for each of 4 microbatches and the bucket; one read replaces them in replayed steps.
    assert (eager.reads[2], graphed.reads[2]) == (10, 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["validate_results", "disabled"])
def test_stages_end_together(mode: str, run: Callable[..., tuple[Run, Run]]) -> None:
    eager, graphed = run("gradient", mode, 2)
    assert graphed.codes == eager.codes
    assert graphed.messages == eager.messages
    assert graphed.states == eager.states
    assert len(eager.states) == 2


@pytest.mark.slow
def test_a_loss_of_the_last_stage_is_reproducible(run: Callable[..., tuple[Run, Run]]) -> None:
    """Eager training compares with memory of a loss that the schedule has freed, and exits 17."""
    eager, graphed = run("loss", "validate_results", 2)
    assert graphed.codes == [16, 16]
    assert graphed.states == eager.states
    assert any("is reproducible within the tolerance (nan = nan" in m for m in graphed.messages)
