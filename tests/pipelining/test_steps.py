"""Every schedule class on two and four ranks: graphs equal eager to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.stage import _RecvInfo

PROGRAM = Path(__file__).with_name("rank_program.py")
PYTHON_PATH = os.pathsep.join(map(str, [PROGRAM.parents[2], PROGRAM.parents[1] / "support"]))
TORCH_FREES_RECEIVES = hasattr(_RecvInfo, "allocate_buffer")  # torch 2.15
# These run backwards in another order, so sums of gradients are rounded differently.
OTHER_ORDER = ("looped bfs",)
# This trains another model.
OTHER_MODEL = ("1f1b kwargs",)
FEW = (
    "1f1b,gpipe,csv,interleaved,interleaved paged,interleaved zero bubble,zero bubble v,"
    "frozen first 1f1b,"
    "frozen middle interleaved,frozen first interleaved,frozen first zero bubble"
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("size", "only"),
    [
        pytest.param(2, FEW, id="few"),
        pytest.param(2, "", id="2", marks=pytest.mark.slow),
        pytest.param(4, "", id="4", marks=pytest.mark.slow),
    ],
)
def test_schedules_are_equal_to_eager(size: int, only: str, tmp_path: Path) -> None:
    """One job for all cases: most of its time is the import of torch."""
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, PROGRAM, tmp_path, str(size)],
            env={**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "CASES": only},
            stdout=output,
            stderr=output,
        )
        try:
            code = process.wait(timeout=280)
        finally:
            process.kill()
    errors = "\n".join(path.read_text() for path in sorted(tmp_path.glob("error*")))
    assert code == 0, errors or log.read_text()
    compared: set[str] = set()
    ranks = [torch.load(tmp_path / f"{size}.{r}.pt", weights_only=False) for r in range(size)]
    for name in ranks[0]:
        of_case = [results[name] for results in ranks]
        check(f"{name} on {size} ranks", of_case)
        others = OTHER_ORDER + OTHER_MODEL
        is_other = name in others or "data" in name or name.endswith("first paged")
        if is_other or name.startswith("lora all"):
            continue
        if name.startswith(("frozen", "lora")):
            references = " ".join((*name.split()[:2], "interleaved")), name
            trained = [[results[r] for results in ranks] for r in references if r in ranks[0]]
            assert "1f1b" in name or "gpipe" in name or same_training(*trained), name
            continue
        for reference in ("1f1b", "1f1b of more"):
            of_1f1b = [results.get(reference) for results in ranks]
            if of_1f1b[0] is not None and of_1f1b[0]["counts"] == of_case[0]["counts"]:
                assert same_training(of_case, of_1f1b), f"{name} on {size} ranks: not as 1f1b"
                compared.add(name)
    expected = {"interleaved", "interleaved zero bubble"} | (
        {"gpipe", "csv"} if size == 2 else set()
    )
    if torch.__version__ >= (2, 12):  # earlier releases run no V shapes over gloo
        expected |= {"zero bubble v"} | ({"dual pipe v"} if size == 4 else set())
    assert expected <= compared


def check(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(ranks):
        where = f"{name}, rank {rank}"
        # Torch loses gradients of the stage after frozen ones.
        if not name.startswith(("frozen first zero bubble", "lora last zero bubble")):
            assert all(result["equal"]), f"{where}: {result['equal']}"
            assert result["parameters equal"], where
        assert "paged" in name or not any(result["inputs elsewhere"]), where
        of_torch, ours = result["receive buffers"]
        assert ours == 0, where
        is_alone = result["num forwards alone"] > 0  # it may receive nothing
        assert of_torch or TORCH_FREES_RECEIVES or is_alone, "torch frees them, too"
        check_receive_memory(name, where, result)
        counters = result["counters"]
        assert counters.capture_sessions == 1, where
        assert counters.captures == result["pairs"], where
        num_eager = counters.fallbacks.pop("forward only", 0)
        assert dict(counters.fallbacks) == {"capture warmup": result["num warmup"]}, where
        # Of two evaluations the second is replayed, if every rank may; few steps have only one.
        most = 1 + (len(result["counts"]) > 3)
        is_replayed = num_eager and most > 1 and not any(r["only training"] for r in ranks)
        assert num_eager == (0, 1 if is_replayed else most)[num_eager > 0], where
        num_evaluated = result["num chunks"] * result["counts"][0] if is_replayed else 0
        assert result["evaluated"] == num_evaluated, where
        assert counters.replays == result["num replays"], where
        num_backwards = counters.replays - result["num forwards alone"]
        assert counters.backward_replays == num_backwards, where
        splits = any(word in name for word in ("zero bubble", "dual pipe"))
        assert counters.weight_replays == splits * num_backwards, where


def check_receive_memory(name: str, where: str, result: dict[str, Any]) -> None:
    """Check reuse, which begins once torch has set up the stages for the step's count."""
    num_buffers = result["receive memory"]
    assert num_buffers[0] == 0, f"{where}: in an eager step"
    if TORCH_FREES_RECEIVES:
        assert not any(num_buffers), where
        return
    if name.startswith("dual pipe v repeated"):
        assert num_buffers[1:] == [2, 2], f"{where}: for the 8 receives of a step"


def same_training(case: list[dict[str, Any]], reference: list[dict[str, Any]]) -> bool:
    """Return whether two pipelines have the same parameters and losses."""
    a, b = (
        {name: p for result in ranks for name, p in result["parameters"].items()}
        for ranks in (case, reference)
    )
    losses_a, losses_b = (
        [loss for result in ranks for losses in result["losses"] for loss in losses]
        for ranks in (case, reference)
    )
    return (
        a.keys() == b.keys()
        and all(torch.equal(a[name], b[name]) for name in a)
        and all(map(torch.equal, losses_a, losses_b))
    )
