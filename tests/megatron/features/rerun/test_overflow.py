"""Steps that run again or are aborted restore their state on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from extended_config import config_from_mapping
from in_process import EXPERTS, Trained, attach
from refused import refused

from chunkgraph.engine import CaptureOptions
from chunkgraph.errors import ConfigError, VerifyError
from chunkgraph.megatron import site
from chunkgraph.megatron.features.experts.feature import Experts
from chunkgraph.megatron.features.experts.room import RowCounts, factor_for_all
from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.megatron.features.rerun import running_metrics
from chunkgraph.megatron.features.stash import ExpertStash
from chunkgraph.megatron.rules.experts import MOE_RULES
from chunkgraph.memory.stash import PagedStash
from chunkgraph.packing import PackedShape
from chunkgraph.settings import StashConfig
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.trained_model import forward_step

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(60)]


class _Run(Trained):
    """A model in this process, trained step by step; the forward ``fails_at`` raises."""

    def __init__(
        self,
        device: Any,
        make_config: Callable[..., dict[str, Any]],
        experts: dict[str, Any],
        graphs: dict[str, Any],
        **model_options: Any,
    ) -> None:
        config = make_config(
            model={"num_layers": 2, "swiglu": True},
            moe={**EXPERTS, **experts},
            train={"micro_batch_size": 3},
        )
        super().__init__(device, config_from_mapping(config), graphs, **model_options)

    def step(
        self,
        step: int,
        count: int,
        fails_at: int | None = None,
        on_backward: Callable[[], None] | None = None,
    ) -> list[float]:
        num_forwards = 0

        def failing(data: Any, chunk: Any) -> Any:
            nonlocal num_forwards
            output, loss = forward_step(data, chunk)
            if on_backward is not None:
                output.register_hook(lambda _: on_backward())
            num_forwards += 1
            if num_forwards - 1 == fails_at:
                raise KeyError("a loss that is not there")
            return output, loss

        return super().step(step, count, forward=failing)


def test_room_for_all_is_no_row_more_than_there_are_tokens() -> None:
    from megatron.core.transformer.moe.moe_utils import get_capacity

    some_is_too_much = False
    for num_experts, top_k in ((4, 2), (7, 3), (60, 4), (64, 6), (160, 6), (384, 8)):
        factor = factor_for_all(num_experts, top_k)
        for num_tokens in (*range(1, 600), 4096, 65536, 10**6):
            chosen = num_tokens * top_k
            assert get_capacity(chosen, num_experts, factor) == num_tokens
            exact = get_capacity(chosen, num_experts, num_experts / top_k)
            some_is_too_much |= exact > num_tokens
    assert some_is_too_much


@pytest.mark.slow
@pytest.mark.every_release
@pytest.mark.parametrize("scope", ["block", "chunk"])
def test_no_metric_counts_a_step_twice(one_rank: Any, make_config: Any, scope: str) -> None:
    """Metrics of routers and of multi-token prediction; in scope block the latter stays eager."""
    seen = []
    for factor, drops in ((factor_for_all(4, 2), "count"), (1.0, "rerun")):
        running = running_metrics()
        for value in running.values():
            value.zero_()
        run = _Run(
            one_rank,
            make_config,
            {"moe_expert_capacity_factor": factor},
            {"token_drops": drops, "scope": scope},
            transformer_options={"mtp_num_layers": 1},
        )
        for step in range(3):
            run.step(step, 2)
        metrics = running_metrics()
        assert {name.split()[0] for name in metrics} == {"experts", "multi-token"}
        assert all(value.count_nonzero() for value in metrics.values() if value.numel() > 1)
        seen.append({name: value.tolist() for name, value in metrics.items()})
        num_reruns = sum(run.graphs.counters.overflow_reruns.values())
        assert (num_reruns > 0) == (drops == "rerun")
        run.graphs.detach()
    assert seen[0].keys() == seen[1].keys()
    for name, values in seen[0].items():
        assert seen[1][name] == pytest.approx(values, rel=1e-4), name


def test_a_wrong_replay_of_a_step_with_room_is_an_error(one_rank: Any, make_config: Any) -> None:
    """At the end of the step, when it is known that it does not run again."""
    stash = StashConfig(enabled=True, initial_bytes=1 << 20)
    graphs = {"stash": stash, "options": CaptureOptions(verify="shadow")}
    run = _Run(one_rank, make_config, {}, graphs)
    run.step(0, 2)
    run.step(1, 2)
    for module in run.chunks[0].modules():
        if hasattr(module, "topk"):
            module.topk = 1  # a number in Python, which graphs do not read
    backwards: list[int] = []
    with pytest.raises(VerifyError, match=r"(?s)replayed forward of microbatch 0 .*changes"):
        run.step(2, 2, on_backward=lambda: backwards.append(1))
    assert len(backwards) == 2
    assert _num_pages_left(run) == 0


def _num_pages_left(run: Any) -> int:
    """Return how many pages the last step did not free."""
    return int(run.graphs.find(ExpertStash)._saving.stash.status().num_required_pages)


@pytest.mark.slow
def test_an_aborted_step_leaves_no_page_in_use(one_rank: Any, make_config: Any) -> None:
    losses = []
    for fails in (False, True):
        graphs = {"stash": StashConfig(enabled=True, initial_bytes=1 << 20)}
        run = _Run(one_rank, make_config, {}, graphs)
        run.step(0, 2)
        run.step(1, 2)
        if fails:
            with pytest.raises(KeyError):
                run.step(2, 3, fails_at=0)  # takes pages without a backward
        losses.append([run.step(2, 3), run.step(3, 1)])
        status = run.graphs.find(ExpertStash).status()
        assert status.num_short == 0
        assert _num_pages_left(run) == 0
        # These numbers are of the last forward, when one microbatch has pages.
        pages = status.num_free_pages + status.num_required_pages
        assert pages == run.graphs.find(ExpertStash).num_pages
        run.graphs.detach()
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_graphs_and_pages_are_made_again_where_their_memory_was_replaced(
    one_rank: Any, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepEP replaces its buffer when a pass has more tokens than earlier ones."""
    losses, now = [], False
    monkeypatch.setattr(Experts, "is_memory_replaced", lambda _: now)
    for is_replaced in (False, True):
        run = _Run(
            one_rank, make_config, {}, {"stash": StashConfig(enabled=True), "token_drops": "rerun"}
        )
        losses_of_run = [run.step(step, 2) for step in range(3)]
        now = is_replaced
        losses_of_run.append(run.step(3, 3))  # noticed at its end
        now = False
        losses_of_run += [run.step(step, 2) for step in (4, 5)]
        fallbacks = {"capture warmup": 1}
        if is_replaced:
            fallbacks["memory of the graphs was replaced"] = 1
        assert run.graphs.counters.fallbacks == fallbacks
        assert run.graphs.counters.capture_sessions == 1 + is_replaced
        assert run.graphs.counters.replayed_steps == 5 - is_replaced
        losses.append(losses_of_run)
        run.graphs.detach()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_what_forwards_decide_is_sent_before_the_last_backward(
    one_rank: Any, make_config: Any, is_recomputed: bool
) -> None:
    """Recomputed experts are counted in backwards, so their counts are sent after those."""
    options = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    run = _Run(
        one_rank,
        make_config,
        {},
        {"token_drops": "rerun", "stash": None if is_recomputed else StashConfig(enabled=True)},
        transformer_options=options if is_recomputed else {},
    )
    for step in range(2):
        run.step(step, 2)
    events: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind, method in ((RowCounts, "send"), (PagedStash, "send_status")):
            plain = getattr(kind, method)

            def noted(self: Any, plain: Any = plain, name: str = kind.__name__) -> None:
                events.append(name)
                plain(self)

            patch.setattr(kind, method, noted)
        run.step(2, 3, on_backward=lambda: events.append("backward"))
    assert run.graphs.counters.replayed_steps == 2
    if is_recomputed:
        assert events == ["backward"] * 3 + ["RowCounts"]
    else:
        assert events == ["backward"] * 2 + ["RowCounts", "PagedStash", "backward"]


def test_tokens_of_a_step_that_failed_are_not_the_next_ones(
    one_rank: Any, make_config: Any
) -> None:
    run = _Run(one_rank, make_config, {}, {"token_drops": "raise"})
    run.step(0, 2)
    experts: Any = run.graphs.features.find(Experts)
    experts._experts.counts.total[0] += 5  # as if its forwards had dropped tokens
    with pytest.raises(KeyError):
        run.step(1, 2, fails_at=0)
    run.step(1, 2)


def test_ranks_agree_on_buckets_apart_from_steps(
    one_rank: Any, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An announcing rank asks about a step earlier than other ranks. In a common group its question
    would meet another kind."""
    questions: list[tuple[int, int]] = []
    closed = []

    class Group:
        def __init__(self) -> None:
            groups.append(self)

        def __call__(self, values: Sequence[int]) -> list[int]:
            questions.append((groups.index(self), len(values)))
            return list(values)

        def close(self) -> None:
            closed.append(groups.index(self))

    groups: list[Group] = []
    monkeypatch.setattr(site, "agree_by_maximum", Group)
    config = config_from_mapping(make_config())
    graphs = attach(
        build_model(config, one_rank), packing=PackingOptions(PackedShape(4, 16), (0.5,))
    )
    questions.clear()
    assert graphs.agree_on_buckets([[3], [4, 4], [9]]) == [8, 8, 16]
    ((of_buckets, _),) = questions
    assert groups[of_buckets] is not graphs.site.agree  # the group for questions about steps
    graphs.detach()
    assert sorted(closed) == list(range(len(groups)))


def test_what_is_done_about_drops_is_checked(one_rank: Any, make_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"token_drops is 'rasie'.*'raise'"):
        _Run(one_rank, make_config, {}, {"token_drops": "rasie"})
    holds = {**EXPERTS, "moe_pad_expert_input_to_capacity": True, "fp8": "hybrid"}
    holds["moe_token_dispatcher_type"] = "alltoall"
    assert refused(MOE_RULES, holds, token_drops="raise") == []
    (refusal,) = refused(MOE_RULES, holds, token_drops="rerun")
    assert "token_drops='rerun' with fp8='hybrid'" in refusal
