"""The stash of Megatron's experts and steps that run again equal eager to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from extended_config import extended
from in_process import EXPERTS, Trained
from refused import refused

from chunkgraph.engine import StepMode
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.feature import Shortage
from chunkgraph.megatron.features.stash import ExpertStash
from chunkgraph.megatron.rules.features import STASH_RULES
from chunkgraph.memory.stash import RowLayout, RowsInUse, StashStatus
from chunkgraph.settings import StashConfig

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

_EXPERTS = {
    **EXPERTS,
    "moe_z_loss_coeff": 0.01,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 32,
}
_MODEL = {"num_layers": 2, "swiglu": True, "hidden_dropout": 0.1}


def _case(
    make_config: Callable[..., dict[str, Any]],
    counts: list[int],
    *,
    experts: dict[str, Any] | None = None,
    stash: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> dict[str, Any]:
    config = make_config(
        model={**_MODEL, **(model or {})},
        moe={**_EXPERTS, **(experts or {})},
        stash={"enabled": True, **(stash or {})},
        train={"num_microbatches": counts, "micro_batch_size": 3, **(train or {})},
        **sections,
    )
    return {"config": config}


def _check_equal(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        wrong = [step for step in result["steps"] if step["different"] != []]
        assert not wrong, f"{name}: {wrong}"
        assert result["different_parameters"] == {}, name
        assert result["capture_sessions"] == 1 + len(result["recaptures"]), name
        assert result["captures_after_first_session"] == 0, name
        assert result["dropped_tokens"] == 0, name


def _share(result: dict[str, Any], rank: int = 0) -> float:
    """Return the stash's bytes as a share of those of all rows, used or not."""
    assert result["bytes_without_stash"][rank] > 0
    return float(result["stash_bytes"][rank] / result["bytes_without_stash"][rank])


@pytest.mark.every_release
def test_one_rank(
    run_cases: Callable[..., Any], make_config: Callable[..., Any], once: Callable[..., Any]
) -> None:
    counts = [2, 1, 3]
    cases = {
        "poison": _case(make_config, counts, capture={"scope": "chunk", "verify": "poison"}),
        "no_drops": _case(
            make_config,
            [2, 1, 2],
            experts={"moe_expert_capacity_factor": 1.0, "token_drops": "rerun"},
            stash={"enabled": False},
        ),
    }
    # Every step after the capture runs out of pages. Not for each release: the engine has the
    # reruns and pages. "no_drops" and jobs of two ranks have reruns with all releases.
    without = {"initial_bytes": 0, "max_bytes": 4096}
    cases |= once(
        {
            "never_enough": _case(
                make_config,
                counts,
                stash=without,
                train={"use_ddp": False},
                capture={"verify": "shadow"},  # of replays that lost what they stashed
            ),
            "allgather": _case(
                make_config,
                counts,
                experts={"moe_token_dispatcher_type": "allgather"},
                model={"params_dtype": "bfloat16"},
            ),
        }
    )
    results = run_cases(cases, 1, timeout_s=180.0)
    _check_equal(results)
    # Half of the rows are in use, with a headroom of a tenth.
    assert 0.4 < _share(results["poison"]) < 0.7
    for name in results.keys() & {"poison", "allgather"}:
        assert results[name]["overflow_reruns"] == {}, name
        assert all(step["replays"] for step in results[name]["steps"][1:]), name
    assert results["no_drops"]["overflow_reruns"]["expert capacity"] >= 1
    if "never_enough" in results:
        never = results["never_enough"]
        assert never["overflow_reruns"] == {"stash pages": 2}
        assert never["recaptures"] == ["stash pages"]
        assert never["stash_bytes"] == [4096]


@pytest.mark.slow
def test_four_ranks(run_cases: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """Pages run out in two chunks on both pipeline ranks; loads differ from step to step."""
    both = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    experts = {"moe_layer_freq": [0, 1, 1, 1], "token_drops": "raise"}
    short = _case(
        make_config,
        [2, 4, 2, 2],
        model={"num_layers": 4},
        experts=experts,
        stash={"initial_bytes": 4096},
        pipeline={**both, "data_parallel_size": 2, "expert_model_parallel_size": 2},
        train={"overlap_grad_reduce": True, "use_distributed_optimizer": True},
        capture={"scope": "chunk"},
    )
    results = run_cases({"short": short}, 4, timeout_s=150.0)
    _check_equal(results)
    assert results["short"]["overflow_reruns"]["stash pages"] >= 1
    assert results["short"]["steps"][-1]["replays"]


@pytest.mark.slow
def test_two_ranks(run_cases: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """Interleaved, with pages that run out on one rank; and experts on two ranks."""
    pp2 = {"pipeline_model_parallel_size": 2}
    overlap = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    cases = {
        "pp2_vpp2": _case(
            make_config,
            [2, 4, 2],
            model={"num_layers": 4},
            pipeline={**pp2, "virtual_pipeline_model_parallel_size": 2},
            train={"overlap_grad_reduce": True},
            capture={"shared_slots": True},
        ),
        "one_rank_short": _case(
            make_config,
            [3, 1, 5, 4],
            experts={"moe_layer_freq": [0, 1]},
            stash={"initial_bytes": 4096},
            pipeline=pp2,
            capture={"scope": "chunk"},
        ),
        "ep2": _case(
            make_config,
            [2, 1, 3],
            stash={"initial_bytes": 4096, "max_bytes": 4096},
            pipeline={"data_parallel_size": 2, "expert_model_parallel_size": 2},
            train=overlap,
        ),
    }
    results = run_cases(cases, 2, timeout_s=150.0)
    _check_equal(results)
    assert results["ep2"]["overflow_reruns"]["stash pages"] >= 1
    assert results["ep2"]["recaptures"] == []
    assert results["pp2_vpp2"]["overflow_reruns"] == {}
    assert all(_share(results["pp2_vpp2"], rank) < 0.7 for rank in range(2))
    alone = results["one_rank_short"]
    assert alone["stash_bytes"][0] == alone["bytes_without_stash"][0] == 0
    assert alone["overflow_reruns"]["stash pages"] >= 1
    assert alone["recaptures"]
    assert alone["steps"][-1]["replays"] == 4


@pytest.fixture
def config(make_config: Callable[..., dict[str, Any]]) -> Iterator[Any]:
    with extended(_case(make_config, [1])["config"]) as config:
        yield config


@pytest.mark.slow
def test_the_log_has_the_reason_of_a_rerun_and_detach_leaves_nothing(
    one_rank: Any, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Trained(one_rank, config, {"stash": StashConfig(enabled=True, initial_bytes=2048)})
    first = [run.step(step, 2) for step in range(3)]
    log = caplog.text
    assert "did not fit in the stash (it has 2 pages of 1024 bytes" in log
    assert "captured again with more room (stash pages); recaptures so far: 1." in log
    assert run.graphs.counters.capture_sessions == 2
    assert run.graphs.find(ExpertStash).status().num_short == 0
    modules = list(run.chunks[0].modules())
    assert any("forward" in vars(m) for m in modules)
    run.graphs.detach()
    assert not any("forward" in vars(m) for m in modules)
    plain = Trained(one_rank, config, {"stash": StashConfig()})
    assert plain.graphs.find(ExpertStash) is None
    assert [plain.step(step, 2) for step in range(3)] == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_moe_experts": None}, "only experts stash"),
        ({"recompute_granularity": "full"}, "recomputed instead of saved"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
            r"recompute_modules=\['moe_act'\]",
        ),
        ({"fp8": "hybrid"}, "fp8='hybrid'"),
        ({"moe_permute_fusion": True}, "moe_permute_fusion"),
    ],
)
def test_what_cannot_stash_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    holds = {"num_moe_experts": 4, "recompute_granularity": "selective", "recompute_modules": []}
    assert refused(STASH_RULES, holds, stash=True) == []
    (refusal,) = refused(STASH_RULES, {**holds, **changes}, stash=True)
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(refusal)


def _stash(num_pages: int, **sizes: int) -> Any:
    """Make the stash of a rank with ``num_pages`` pages of 4 bytes."""
    config = StashConfig(enabled=True, initial_bytes=4 * num_pages, **sizes)
    stash = ExpertStash([], (2,), config, torch.device("cpu"))
    _capture(stash)
    assert stash.num_pages == num_pages
    return stash


def _capture(stash: Any) -> None:
    stash.has_experts = True
    with stash.capturing():
        pass


def _run_short(stash: Any, num_pages: int) -> Shortage:
    """Let a step need so many pages; return the shortage."""
    stash.status = lambda: StashStatus(0, 0, num_peak_pages=num_pages, num_short=1)
    shortage = stash.shortage(StepMode.REPLAY)
    assert shortage is not None
    if not shortage.is_at_limit:
        stash.make_room(lambda values: values)
    _capture(stash)
    return shortage


def test_every_time_more_pages_are_taken_with_twice_the_margin() -> None:
    stash, sizes = _stash(90), []
    for wanted in (100, 200, 400, 1000, 2000):
        assert not _run_short(stash, wanted).is_at_limit
        sizes.append(stash.num_pages)
    assert sizes == [120, 280, 720, 2600, 5200]
    _capture(stash)
    assert stash.num_pages == 5200


def test_no_more_pages_are_taken_than_can_be_used_or_are_allowed() -> None:
    stash, rows = _stash(20), RowsInUse.of(torch.ones(64, dtype=torch.bool))
    with stash._meter.forward(0):
        for _ in range(20):
            stash._meter.add(rows, RowLayout(64, 1, 64))
    assert stash._meter.most_pages(2) == 40
    _run_short(stash, 39)
    assert stash.num_pages == 40
    limited = _stash(20, max_bytes=25 * 4)
    assert not _run_short(limited, 100).is_at_limit
    assert limited.num_pages == 25
    shortage = _run_short(limited, 100)
    assert shortage.is_at_limit
    assert shortage.limit == "stash.max_bytes"
    assert limited.num_pages == 25
