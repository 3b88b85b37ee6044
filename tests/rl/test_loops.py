"""Cycles of reinforcement learning have the bits of the same loop without graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packed_cases import GPU_MODEL
from training_needs import NEEDS_ENGINE

EAGER = {"capture warmup": 1, "forward only": 1, "nothing replayed": 1}
"""Eager steps of every loop; one forward-only pass has gradients enabled."""
MISFITS = {"packing overflow": 1, "forward only": 3}
"""Eager steps of loops with packs that fit no bucket."""

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(180)]


def case_of(make_config: Callable[..., dict[str, Any]], pp: int, vpp: int | None) -> dict[str, Any]:
    pipeline = {
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
    }
    config = make_config(
        model={"layer_spec": "user_specs:packed", "num_layers": 4},
        pipeline=pipeline,
        train={"num_microbatches": [2]},
    )
    return {"probe": "rl", "config": config, "num_cycles": 4}


@pytest.mark.parametrize(("pp", "vpp", "dp"), [(1, None, 2), (2, None, 1), (2, 2, 1)])
def test_rows_are_pinned_in_training_and_forward_only_steps(
    run_cases: Callable[..., Any],
    make_config: Callable[..., Any],
    pp: int,
    vpp: int | None,
    dp: int,
) -> None:
    result = run_cases({"loop": case_of(make_config, pp, vpp)}, pp * dp)["loop"]
    for rank in result["ranks"]:
        assert rank["different"] == []
        assert rank["scope"] == "chunk"
        num_misfits = int(vpp is None)
        assert rank["fallbacks"].pop("packing overflow", 0) == num_misfits
        assert rank["fallbacks"] == {**EAGER, "forward only": 1 + 2 * num_misfits}
        assert (rank["sessions"], rank["replayed"]) == (1, 7 - num_misfits)
        assert (rank["forward_sessions"], rank["forward_replayed"]) == (1, 6 - 2 * num_misfits)
        assert rank["eager_calls"] == 0
    assert (result["ranks"][-1]["in_place"] > 0) is (pp > 1)


def test_memory_that_moves_is_captured_again(
    run_cases: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    case = {**case_of(make_config, 2, None), "moves": True}
    case["options"] = {"on_moved_memory": "recapture"}
    for rank in run_cases({"loop": case}, 2)["loop"]["ranks"]:
        assert rank["different"] == []
        assert rank["fallbacks"] == {**EAGER, **MISFITS}
        assert rank["recaptures"] == rank["sessions"] - 1 == 5
        assert rank["forward_replayed"] == 4


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_only_graphs_with_collectives_are_captured_again_for_new_groups(
    run_cases: Callable[..., Any],
    make_config: Callable[..., Any],
    tmp_path: Path,
    tp: int,
    pp: int,
) -> None:
    case = case_of(make_config, pp, None)
    case["config"]["pipeline"]["tensor_model_parallel_size"] = tp
    case |= {"store": str(tmp_path)}
    case["options"] = {"on_moved_memory": "recapture", "can_sleep": True}
    for rank in run_cases({"loop": case}, 2)["loop"]["ranks"]:
        assert rank["different"] == []
        assert rank["fallbacks"] == {**EAGER, **MISFITS}
        assert rank["recaptures"] == rank["sessions"] - 1 == (3 if tp > 1 else 0)
        # Its norm is a sum over ranks: eager in the first step after each change, then captured.
        assert rank["optimizer_captures"] == 4
        assert (rank["forward_replayed"], rank["eager_calls"]) == (4, 0)


def test_no_rank_waits_for_ever_for_one_that_failed_in_the_middle_of_a_step(
    run_to_its_end: Callable[..., Any], make_config: Callable[..., Any], tmp_path: Path
) -> None:
    """The rank that failed goes on living, as those of frameworks that catch errors do."""
    case = case_of(make_config, 2, None)
    case["config"]["run"] = {"timeout_s": 6}
    codes, messages = run_to_its_end({**case, "store": str(tmp_path)})
    assert codes == [2, 1]
    assert "rows on this rank, but" in messages[0]
    assert "Rank 1 stopped because another rank ended or did not answer in time" in messages[1]


@NEEDS_ENGINE
@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moves", [False, True])
def test_one_gpu(
    run_cases: Callable[..., Any], make_config: Callable[..., Any], moves: bool
) -> None:
    config = make_config(model=GPU_MODEL, train={"num_microbatches": [2], "deterministic": True})
    case = {
        "probe": "rl",
        "config": {**config, "device": "cuda"},
        "num_cycles": 4,
        "buckets": [128, 256],
        "moves": moves,
        "options": {"on_moved_memory": "recapture"},
    }
    (rank,) = run_cases({"loop": case}, 1, timeout_s=280.0)["loop"]["ranks"]
    assert rank["different"] == []
    assert rank["fallbacks"] == {**EAGER, **MISFITS}
    assert (rank["forward_replayed"], rank["eager_calls"]) == (4, 0)
    assert rank["recaptures"] == (5 if moves else 0)
