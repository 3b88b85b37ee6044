"""The measurement of empty sequences runs. On a CPU it has no graphs: the times mean nothing."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "empty_sequences.py"


# Not for each release of Megatron: it measures with one.
@pytest.mark.timeout(100)
def test_the_same_documents_among_more_sequences(
    tmp_path: Path, run_script: Callable[..., tuple[list[int], str]]
) -> None:
    path = tmp_path / "out.json"
    arguments = {
        "--device": "cpu",
        "--layer-spec": "user_specs:packed",
        "--json": str(path),
        "--tokens": "64",
        "--hidden-size": "32",
        "--heads": "2",
        "--rounds": "2",
        "--num-layers": "2",
        "--documents": "8",
    }
    parts = [part for item in arguments.items() for part in item]
    codes, output = run_script(PROGRAM, *parts, "20", num_ranks=1)
    assert codes == [0], output
    document = json.loads(path.read_text())
    measured = document["measured"]
    assert [(len(one["lengths"]), one["num_seqs"]) for one in measured] == [
        *((8, 8), (8, 32), (8, 64), (8, 512)),
        *((20, 20), (20, 32), (20, 64), (20, 512)),
    ]
    assert [one["num_seqs"] for one in measured if one["is_replayed"]] == [32, 32]
    assert [one["ratio"] == 1 for one in measured] == [True, False, False, False] * 2
    assert document["model"]["num_layers"] == 2
    assert all(sum(one["lengths"]) == 64 for one in measured)
    assert all(one["ms"] > 0 and len(one["ms_all"]) == 2 for one in measured)
    assert all(one["same_output"] and one["same_gradient"] for one in measured)
    assert output.count("bits of output same, gradient same") == 8
    assert output.count(" ms, ") == 8
    assert output.count("replayed by default") == 2
    assert all(one["error"] is None for one in measured)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("empty_sequences", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_fill_the_row_and_are_cut_to_their_limit(script: ModuleType) -> None:
    assert script._lengths(8, 128, None) == [2, 4, 6, 10, 14, 20, 32, 40]
    assert script._lengths(8, 128, 16) == [2, 4, 6, 10, 14, 16, 4, 16, 16, 16, 16, 8]
    for count in (1, 65, 260, 4096):
        lengths = script._lengths(count, 4096, None)
        assert len(lengths) == count
        assert sum(lengths) == 4096
        assert min(lengths) > 0


def test_what_training_would_replay_is_measured(script: ModuleType) -> None:
    # The dummy document counts as a sequence.
    assert script._sequences(63, [64, 512], 4096) == {63: False, 64: True, 512: False}
    assert script._sequences(64, [64, 512], 4096) == {64: False, 128: True, 512: False}
    assert script._sequences(260, [64, 512], 4096) == {260: False, 512: True}
    assert script._sequences(8, [64], 1024) == {8: False, 32: True, 64: False}


def test_there_is_a_layer_to_measure(
    run_script: Callable[..., tuple[list[int], str]],
) -> None:
    codes, output = run_script(PROGRAM, "--num-layers", "0", num_ranks=1)
    assert codes == [2]
    assert "--num-layers is 1 or more" in output


def test_all_layers_are_measured(
    script: ModuleType, one_rank: Any, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chunkgraph.settings import config_from_mapping
    from chunkgraph.trainer.model import build_model
    from chunkgraph.trainer.setup import seed_everything

    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support"))
    model = {"layer_spec": "user_specs:packed", "num_layers": 3}
    train = {"micro_batch_size": 1, "use_ddp": False}
    packing = {"max_packed_seqs": 4, "max_packed_tokens": 32}
    config = config_from_mapping(make_config(model=model, train=train, packing=packing))
    seed_everything(1, one_rank)
    (chunk,) = build_model(config, one_rank)
    work = script._layer_work(chunk, [20, 12], 32, 4, None, one_rank)
    seen: list[int] = []
    layers = next(m for m in chunk.modules() if hasattr(m, "layers")).layers
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: seen.append(number))
    before = [parameter.grad.clone() for parameter in layers.parameters()]
    work()
    assert seen == [0, 1, 2]
    after = [parameter.grad for parameter in layers.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
