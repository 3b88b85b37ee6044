"""The stash of Megatron's experts and steps that run again equal eager to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from extended_config import extended
from in_process import EXPERTS, Trained
from refused import refused

from chunkgraph.errors import CaptureError, ConfigError, StashError
from chunkgraph.megatron.features.stash.feature import ExpertStash
from chunkgraph.megatron.rules.features import STASH_RULES
from chunkgraph.memory.stash import RowLayout, RowsInUse, StashOptions, StashStatus

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

_EXPERTS = {
    **EXPERTS,
    "moe_z_loss_coeff": 0.01,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 32,
}
_STASH = {"enabled": True, "page_bytes": 512}
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
        stash={**_STASH, **(stash or {})},
        train={"num_microbatches": counts, "micro_batch_size": 3, **(train or {})},
        **sections,
    )
    return {"config": config}


def _check_equal(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        equal = ("loss_equal", "grad_norm_equal", "expert_metrics_equal")
        wrong = [step for step in result["steps"] if not all(step[key] for key in equal)]
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
            "allgather_spilled": _case(
                make_config,
                counts,
                experts={"moe_token_dispatcher_type": "allgather"},
                model={"params_dtype": "bfloat16"},
                stash={"initial_bytes": 4096, "spill_bytes": 1 << 20},
            ),
        }
    )
    results = run_cases(cases, 1, timeout_s=180.0)
    _check_equal(results)
    # Half of the rows are in use, with a headroom of a tenth.
    assert 0.4 < _share(results["poison"]) < 0.7
    for name in results.keys() & {"poison", "allgather_spilled"}:
        assert results[name]["overflow_reruns"] == {}, name
        assert all(step["replays"] for step in results[name]["steps"][1:]), name
    assert results["no_drops"]["overflow_reruns"]["expert capacity"] >= 1
    if "never_enough" in results:
        never = results["never_enough"]
        assert never["overflow_reruns"] == {"stash pages": 2}
        assert never["recaptures"] == ["stash pages"]
        assert never["stash_bytes"] == [4096 + 512]


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
        stash={"headroom": 0.7},
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
            stash={"headroom": 0.6},
            pipeline=pp2,
            capture={"scope": "chunk"},
        ),
        "ep2": _case(
            make_config,
            [2, 1, 3],
            stash={"headroom": 0.7, "max_recaptures": 0},
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


def _options(**changes: Any) -> Any:
    return StashOptions(page_bytes=512, **changes)


def test_an_overflow_is_an_error_where_that_is_asked_for(one_rank: Any, config: Any) -> None:
    run = Trained(one_rank, config, {"stash": _options(initial_bytes=2048, on_overflow="raise")})
    run.step(0, 2)
    with pytest.raises(StashError, match=r"(?s)saved tensors did not fit .*stash\.headroom"):
        run.step(1, 2)


def test_the_log_has_the_reason_of_a_rerun_and_detach_leaves_nothing(
    one_rank: Any, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Trained(one_rank, config, {"stash": _options(initial_bytes=2048, max_recaptures=1)})
    first = [run.step(step, 2) for step in range(3)]
    log = caplog.text
    assert "did not fit in the stash (it has 4 pages of 512 bytes" in log
    assert "captured again with more room (stash pages); recaptures so far: 1." in log
    assert run.graphs.counters.capture_sessions == 2
    assert run.graphs.find(ExpertStash).status().num_short == 0
    modules = list(run.chunks[0].modules())
    assert any("forward" in vars(m) for m in modules)
    run.graphs.detach()
    assert not any("forward" in vars(m) for m in modules)
    plain = Trained(one_rank, config, {})
    assert [plain.step(step, 2) for step in range(3)] == first


@pytest.mark.parametrize(("skips", "stashes"), [(False, True), (True, False)])
def test_a_chunk_with_one_slot_may_keep_what_it_saves(
    one_rank: Any, config: Any, *, skips: bool, stashes: bool
) -> None:
    run = Trained(one_rank, config, {"stash": _options(skips_single_slots=skips)})
    losses = [run.step(step, 2) for step in range(3)]
    assert run.graphs.num_slots == (1,)
    assert bool(run.graphs.find(ExpertStash).size.num_pages) == stashes
    assert bool(run.graphs.find(ExpertStash).full_bytes()) == stashes
    assert (run.graphs.find(ExpertStash).status().num_peak_pages > 0) == stashes
    assert run.graphs.counters.replays
    run.graphs.detach()
    plain = Trained(one_rank, config, {})
    assert [plain.step(step, 2) for step in range(3)] == losses


def test_without_a_measured_step_the_capture_names_what_is_missing(
    one_rank: Any, config: Any
) -> None:
    run = Trained(one_rank, config, {"stash": _options()})
    with (
        pytest.raises(CaptureError, match=r"never measured.*initial_bytes"),
        run.graphs.find(ExpertStash).capturing(),
    ):
        pass


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


def _shortage(pages: int) -> Any:
    return StashStatus(0, 0, 0, num_peak_pages=pages, num_short=1)


def _stash(num_pages: int, **options: Any) -> Any:
    """Make the stash of a rank with ``num_pages`` pages on the device and ten on the host."""
    settings = {"initial_bytes": num_pages * 65536, "spill_bytes": 10 * 65536, **options}
    stash = ExpertStash([], (2,), StashOptions(page_bytes=65536, **settings), torch.device("cpu"))
    _capture(stash)
    assert stash.size.num_pages == num_pages
    return stash


def _capture(stash: Any) -> None:
    stash.has_experts = True
    with stash.capturing():
        pass


def test_every_time_more_pages_are_taken_with_twice_the_margin() -> None:
    stash = _stash(90, headroom=1.25)
    for _ in range(2000):  # only of steps that run again
        assert stash.can_grow(_shortage(80))
        stash.grow(_shortage(80))
    _capture(stash)
    assert stash.size.num_pages == 110  # 80 and half of it, ten of them on the host
    _capture(stash)
    assert stash.size.num_pages == 110
    assert not stash.can_grow(_shortage(60))
    stash.grow(_shortage(61))
    _capture(stash)
    assert stash.size.num_pages == 112  # 61 and all of it
    stash.grow(_shortage(100))
    _capture(stash)
    assert stash.size.num_pages == 290


@pytest.mark.parametrize("headroom", [0.5, 1.0])
def test_without_a_margin_there_is_none_later(headroom: float) -> None:
    stash = _stash(20, headroom=headroom)
    assert not stash.can_grow(_shortage(30))
    stash.grow(_shortage(31))
    _capture(stash)
    assert stash.size.num_pages == 21


def test_no_more_pages_are_taken_than_can_be_used_or_are_allowed() -> None:
    stash = _stash(20, headroom=1.5)
    meter, rows = stash._saving.meter, RowsInUse.of(torch.ones(64, dtype=torch.bool))
    with meter.forward(0):
        for _ in range(20):
            meter.add(rows, RowLayout(64, 1024, 65536))
    assert meter.most_pages((2,)) == 40
    stash.grow(_shortage(39))
    _capture(stash)
    assert stash.size.num_pages == 30
    limited = _stash(20, headroom=1.5, max_bytes=25 * 65536)
    limited.grow(_shortage(100))
    _capture(limited)
    assert limited.size.num_pages == 25
    assert not limited.can_grow(_shortage(100))


@pytest.mark.parametrize(("short", "left"), [(2, 0), (0, 3)])
def test_what_the_last_step_left_is_reported_when_pages_are_released(
    short: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stash = _stash(20)
    last = stash._steps[0]
    monkeypatch.setattr(last, "num_short_late", lambda: short)
    monkeypatch.setattr(last, "num_pages_left", lambda: left)
    with pytest.warns(UserWarning, match=f"step {short} tensors .* and {left} pages"):
        stash.release()
    stash.release()  # reported once
