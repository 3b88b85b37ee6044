"""Exit codes, messages, output and devices of ranks of ``chunkgraph train``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkgraph.settings import config_from_mapping
from chunkgraph.trainer.setup import choose_device

pytestmark = pytest.mark.timeout(100)

RunWorker = Callable[..., tuple[list[int], Path]]
MakeConfig = Callable[..., dict[str, Any]]


# Not for each release of Megatron: the command writes these.
def test_results_and_progress(run_worker: RunWorker, make_config: MakeConfig) -> None:
    """Only rank 0 shows progress and writes results."""
    config = make_config(pipeline={"pipeline_model_parallel_size": 2})
    codes, folder = run_worker(config, 2, forked=True)
    logs = [(folder / f"log{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
    assert codes == [0, 0], logs
    result = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    assert result["different_parameters"] == {}
    assert {"torch", "megatron_core"} <= result["versions"].keys()
    for phase in ("eager", "chunk graphs"):
        counts = re.findall(rf"^{phase}: step \d+/\d+  (\d+) microbatch", logs[0], re.MULTILINE)
        assert list(map(int, counts)) == config["train"]["num_microbatches"]
    assert logs[0].count("chunk graphs: captured") == 1
    assert "step" not in logs[1]
    left = {p.name for p in folder.iterdir()}
    assert left == {"config.yaml", "log0.txt", "log1.txt", "table.json"}


def test_an_unknown_layer_spec(run_worker: RunWorker, make_config: MakeConfig) -> None:
    """Exit code 2 and one message."""
    config = make_config(model={"layer_spec": "user_specs:missing"})
    codes, folder = run_worker(config, 1, forked=True)
    assert codes == [2]
    message = (folder / "error_rank0.txt").read_text(encoding="utf-8").partition("\n\n")[0]
    assert "model.layer_spec is user_specs:missing" in message


def test_ranks_share_a_gpu_only_where_nccl_lets_them(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = config_from_mapping({**make_config(), "device": "cuda"})
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device(config) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device(config) == torch.device("cuda", 3)  # which torch refuses
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert choose_device(config) == torch.device("cuda", 1)


@pytest.mark.megatron
def test_ranks_with_other_settings_end_before_the_model_is_built(
    make_config: MakeConfig, run_script: Callable[..., Any], tmp_path: Path
) -> None:
    """Both ranks name the setting, a rank and both values."""
    config = make_config(pipeline={"pipeline_model_parallel_size": 2})
    (tmp_path / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from chunkgraph.cli.__main__ import main\n"
        f"arguments = ['train', {str(tmp_path / 'config.yaml')!r}, '--debug']\n"
        "other = ['train.seed=99'] if os.environ['RANK'] == '1' else []\n"
        "sys.exit(main([*arguments, *other]))\n",
        encoding="utf-8",
    )
    codes, output = run_script(program, timeout_s=60.0)
    assert codes == [2, 2], output
    # In the traceback and in the message of each rank.
    assert output.count("\n  train.seed: 99 on rank 1, 1234 on rank 0\n") == 4, output
