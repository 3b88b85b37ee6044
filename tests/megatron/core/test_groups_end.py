"""Process groups that end while chunk graphs are attached; NCCL would wait for them for ever."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from in_process import Trained, detach_all
from training_needs import NEEDS_ENGINE

from chunkgraph.engine import CaptureOptions

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(200)]

GONE = {"was_captured": True, "is_captured": False, "has_groups": False}


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Record the groups that torch's function would end."""
    calls: list[Any] = []

    def destroy_process_group(group: Any = None) -> None:
        calls.append(group)

    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "destroy_process_group", destroy_process_group)
    yield calls
    assert dist.destroy_process_group is destroy_process_group
    assert dist.distributed_c10d.destroy_process_group is destroy_process_group


_ON_A_GPU = {
    "layer_spec": "transformer_engine",
    "hidden_size": 64,
    "params_dtype": "bfloat16",
    "seq_length": 128,  # cuDNN up to 9.15 captures attention over multiples of 128 tokens only
}


@pytest.mark.parametrize(
    ("device", "model"),
    [
        pytest.param("cpu", {}, marks=pytest.mark.slow),
        pytest.param("cuda", _ON_A_GPU, marks=[pytest.mark.multigpu, NEEDS_ENGINE]),
    ],
)
def test_a_script_that_forgets_to_detach_ends(
    start_cases: Callable[..., list[int]],
    make_config: Callable[..., Any],
    tmp_path: Path,
    device: str,
    model: dict[str, Any],
) -> None:
    """Also with collectives of NCCL in the graphs."""
    config = make_config(
        model=model,
        pipeline={"tensor_model_parallel_size": 2},
        train={"num_microbatches": [2, 2, 1]},
    )
    case = {"probe": "groups_end", "config": {**config, "device": device}, "out": f"{tmp_path}/out"}
    codes = start_cases([{"name": "forgotten", **case}], 2, 150.0)
    assert codes == [0, 0], (tmp_path / "log0.txt").read_text()[-3000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"out{rank}.json").read_text()) == {"replays": 3, **GONE}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_groups_that_are_made_anew_take_only_graphs_with_collectives(
    one_rank: Any, config: Any, ended: list[Any], num_ranks: int
) -> None:
    def losses(graphs: dict[str, Any] | None) -> tuple[list[list[float]], Any]:
        model = Trained(one_rank, config, graphs)
        model.chunks[0].config.tensor_model_parallel_size = num_ranks  # as rules and groups see it
        results = []
        for number in range(4):
            if number == 2:
                dist.destroy_process_group(object())  # type: ignore[arg-type]
                dist.destroy_process_group()
            results.append(model.step(number, 2))
        return results, model.graphs

    expected, _ = losses(None)
    got, graphs = losses({"options": CaptureOptions(on_moved_memory="recapture")})
    assert got == expected
    assert len(ended) == 4
    assert graphs.counters.fallbacks == {"capture warmup": 1}
    assert graphs.counters.capture_sessions == num_ranks
    assert graphs.counters.replayed_steps == 3
    detach_all()
