"""verl's own Megatron engine has the bits of verl without graphs; `make test-rl` installs it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "verl_loop.py"

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None, reason="verl is not installed; see make test-rl"
    ),
]


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2)])
def test_engines_have_the_bits_of_verl_alone(
    run_script: Callable[..., tuple[list[int], str]],
    make_config: Callable[..., dict[str, Any]],
    tmp_path: Path,
    pp: int,
    dp: int,
    offloads: bool,
) -> None:
    config = make_config(
        model={"layer_spec": "user_specs:packed", "num_layers": 4},
        pipeline={
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": None,
        },
        train={"num_microbatches": [2], "use_distributed_optimizer": True},
        run={"timeout_s": 120},
    )
    case = {"config": config, "num_cycles": 6, "offloads": offloads}
    (tmp_path / "case.json").write_text(json.dumps(case))
    codes, output = run_script(SCRIPT, tmp_path / "case.json", num_ranks=pp * dp, timeout_s=280.0)
    assert codes == [0] * (pp * dp), output
    num_cycles, moves = case["num_cycles"], int(offloads)
    for rank in json.loads((tmp_path / "result.json").read_text()):
        assert rank["num_compared"] > 20
        assert [*rank["runs"]] == ["padded by verl", "padded by graphs"]
        for run in rank["runs"].values():
            assert run["different"] == []
            actor, reference = run["actor"], run["reference"]
            assert actor["fallbacks"] == {"forward only": 1, "capture warmup": 1}
            assert actor["banks"] == ["32 tokens", "64 tokens", "96 tokens"]
            assert reference["fallbacks"] == {"forward only": 1}
            assert (actor["replayed"], reference["replayed"]) == (2 * num_cycles - 1, 0)
            # Captured once; offloading in each cycle moves parameters, and each moves graphs.
            assert actor["sessions"] == 1 + moves * (num_cycles - 1)
            # The second run shares the memory of the first, and so its sleep.
            assert actor["asleep"] >= 2 * num_cycles - 1
            for of in (actor, reference):
                assert (of["scope"], of["forward_replayed"]) == ("chunk", num_cycles - 1)
                assert of["forward_sessions"] == 1 + moves * (num_cycles - 2)
                assert of["eager_calls"] == 0
            assert reference["asleep"] >= num_cycles - 1
