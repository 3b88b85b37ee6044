"""The integrations, in loops that call Megatron as the frameworks do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.integrations import nemo_rl, slime, verl
from chunkgraph.integrations.attached import drawn
from chunkgraph.packing import PackedShape

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(180)]
_CYCLES = 6


def test_cycles_have_the_bits_of_the_framework_alone(
    run_cases: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    config = make_config(
        model={"layer_spec": "user_specs:packed"},
        pipeline={"pipeline_model_parallel_size": 2},
        train={"num_microbatches": [2]},
    )
    cases = {
        name: {
            "probe": "rl_frameworks",
            "framework": name,
            "config": config,
            "num_cycles": _CYCLES,
        }
        for name in ("verl", "nemo_rl", "slime")
    }
    for name, result in run_cases(cases, 2, timeout_s=170.0).items():
        for rank in result["ranks"]:
            assert rank["different"] == [], name
            policy, reference = rank["policy"], rank.get("reference")
            eager = {"forward only": 1, "capture warmup": 1}
            assert policy["fallbacks"] == eager, name
            # Captured once; asleep after each phase that ran captured graphs.
            assert (policy["sessions"], policy["forward_sessions"]) == (1, 1)
            assert policy["replayed"] == 2 * _CYCLES - 1
            of_forwards = [policy] if reference is None else [policy, reference]
            assert sum(of["forward_replayed"] for of in of_forwards) == 2 * _CYCLES - len(
                of_forwards
            )
            assert [of["eager_calls"] for of in of_forwards] == [0] * len(of_forwards)
            assert rank["asleep"] == 3 * _CYCLES - len(of_forwards), name


def settings_of(*on: str, **values: Any) -> Any:
    names = ("dynamic_context_parallel", "use_fused_kernels", "allgather_cp", "use_routing_replay")
    return SimpleNamespace(
        **{name: name in on for name in names}, use_remove_padding=True, **values
    )


@pytest.mark.parametrize("name", ["dynamic_context_parallel", "use_fused_kernels"])
def test_settings_of_verl_that_no_graph_can_hold_are_refused(name: str) -> None:
    class Engine:
        enable_routing_replay = True
        engine_config = settings_of(name)

        def __init__(self) -> None:
            self.module = [nn.Module()]
            self.module[0].config = SimpleNamespace(fp8=None)  # type: ignore[assignment]

        def forward_step(self) -> None:
            """Stand for verl's."""

    step = SimpleNamespace(func=Engine().forward_step)
    with pytest.raises(ConfigError, match=f"in verl cannot run with {name}, router_replay"):
        verl._with_packings({"forward_step_func": step})


def test_other_settings_that_no_graph_can_hold_are_refused() -> None:
    batches = [SimpleNamespace(packed_seq_params=None)]
    step = SimpleNamespace(keywords={"use_router_replay": True})
    keywords = {"data_iterator": iter(batches), "num_microbatches": 1, "forward_step_func": step}
    with pytest.raises(ConfigError, match=r"packing\.enabled=false, router replay"):
        nemo_rl._with_packings(keywords)
    with pytest.raises(ConfigError, match="--allgather-cp, --use-routing-replay"):
        slime.install(settings_of("allgather_cp", "use_routing_replay"), PackedShape(4, 16))


def test_microbatches_are_drawn_once_and_stay_in_order() -> None:
    batches, keywords = drawn({"data_iterator": iter("abc"), "num_microbatches": 2})
    assert batches == [*keywords["data_iterator"]] == ["a", "b"]
    of_chunks = [iter("ab"), iter("cd")]
    batches, keywords = drawn({"data_iterator": of_chunks, "num_microbatches": 2})
    assert batches == ["a", "b"]
    assert [[*one] for one in keywords["data_iterator"]] == [["a", "b"], ["c", "d"]]


def test_slime_pads_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two context-parallel ranks, documents have multiples of four rows in all."""
    for name in ("model", "actor"):
        module: Any = ModuleType(f"slime.backends.megatron_utils.{name}")
        module.get_forward_backward_func = lambda: None
        module.torch_memory_saver = SimpleNamespace(pause=lambda: None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    args = settings_of(
        tensor_model_parallel_size=1, data_pad_size_multiplier=8, context_parallel_size=2
    )
    models = slime.install(args, PackedShape(4, 32, context_parallel_size=2))
    tokens = [bytes(n) for n in (3, 5, 8, 9)]
    data = SimpleNamespace(
        rollout_data={"tokens": tokens}, micro_batch_indices=[[3], [0, 1], [2, 1]], offset=1
    )
    keywords = models._with_packings({"data_iterator": [data], "num_microbatches": 2})
    assert keywords["packings"] == [[4, 8, 4], [8, 8]]
