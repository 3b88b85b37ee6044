"""The worker's files, exit codes and messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(100)

RunWorker = Callable[..., tuple[list[int], Path]]
MakeConfig = Callable[..., dict[str, Any]]


def _line_of(marker: str) -> int:
    text = (Path(__file__).parents[1] / "support" / "user_specs.py").read_text(encoding="utf-8")
    return next(i for i, line in enumerate(text.splitlines(), start=1) if marker in line)


# Not for each release of Megatron: the worker writes these files.
def test_results_and_progress(run_worker: RunWorker, make_config: MakeConfig) -> None:
    """Only rank 0 writes results and progress; no temporary file stays."""
    config = make_config(pipeline={"pipeline_model_parallel_size": 2})
    codes, folder = run_worker(config, 2, forked=True)
    assert codes == [0, 0], (folder / "log0.txt").read_text()
    result = json.loads((folder / "rank0.json").read_text(encoding="utf-8"))
    assert result["parameters_equal"] is True
    assert {"torch", "megatron_core"} <= result["versions"].keys()
    for step in result["steps"]:
        assert float.fromhex(step["loss_chunk_hex"]) == step["loss_chunk"]
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    counts = config["train"]["num_microbatches"]
    for phase in ("eager", "chunk"):
        steps = [x for x in lines if x["event"] == "step" and x["phase"] == phase]
        seen = [x["num_microbatches"] for x in steps]
        assert seen == counts
    captures = [(x["phase"], x["step"]) for x in lines if x["event"] == "capture"]
    assert captures == [("chunk", 1)]
    graphs = [(x["num_captured"], x["num_graphs"]) for x in lines if x["event"] == "capturing"]
    assert graphs == [(i + 1, len(graphs)) for i in range(len(graphs))] != []
    left = {p.name for p in folder.iterdir()}
    assert left == {"config.yaml", "log0.txt", "log1.txt", "rank0.json", "progress.jsonl"}


@pytest.mark.megatron
@pytest.mark.every_release
def test_layer_that_reads_on_the_host(run_worker: RunWorker, make_config: MakeConfig) -> None:
    """The run fails on every rank with the operator, the file and the line of the user's layer."""
    config = make_config(
        model={"layer_spec": "user_specs:watchful"}, pipeline={"pipeline_model_parallel_size": 2}
    )
    codes, folder = run_worker(config, 2, forked=True)
    assert codes == [1, 1]
    assert not (folder / "rank0.json").exists()
    line = _line_of("the line that the error must name")
    for rank in range(2):
        text = (folder / f"error_rank{rank}.txt").read_text(encoding="utf-8")
        message, _, rest = text.partition("\n\n")
        assert re.search(rf"user_specs\.py:{line}\b", message), message
        assert "item" in message, message
        assert f"rank {rank}, pipeline stage {rank}, chunk 0" in message, message
        assert "Traceback" not in message
        assert "Traceback" in rest


# No `megatron` marker: these are refused before Megatron is imported.
@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"layer_spec": "user_specs:missing"}}, ["user_specs:missing", "layer_spec"]),
        ({"model": {"num_layer": 3}}, ["num_layer"]),
    ],
    ids=["unknown layer spec", "unknown key"],
)
def test_bad_usage(
    run_worker: RunWorker,
    make_config: MakeConfig,
    sections: dict[str, Any],
    words: list[str],
) -> None:
    """Exit code 2 and one message."""
    codes, folder = run_worker(make_config(**sections), 1, forked=True)
    assert codes == [2]
    message = (folder / "error_rank0.txt").read_text(encoding="utf-8").partition("\n\n")[0]
    for word in words:
        assert word in message
