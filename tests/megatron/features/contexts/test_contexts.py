"""Banks by context-parallel size: their keys, the calls derived for them, and their plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from thread_ranks import Agreeing, run_ranks
from torch import nn

from chunkgraph.engine import ChunkGraphs, StepPlan
from chunkgraph.errors import ConfigError, SlotError, TopologyError
from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.feature import StepInputs
from chunkgraph.megatron.features.contexts import (
    ContextGroups,
)
from chunkgraph.megatron.features.packing.bank import (
    PackedBank,
    ScheduledBanks,
    digest_of_plan,
)
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.steps import StepPlans
from chunkgraph.packing import ContextLimits, schedule_contexts

# No `megatron` marker: only process groups are Megatron's, the same in all releases.

LIMITS = ContextLimits(world_size=4, max_tokens_per_rank=8, max_packed_seqs=3)


@pytest.mark.parametrize("announces", [False, True])
def test_stages_with_other_plans_of_a_step_stop_on_every_rank(announces: bool) -> None:
    """No rank waits for ever, with and without an announcement."""
    ranks = Agreeing(2)
    refused: list[int] = []

    def step(rank: int) -> None:
        graphs = ChunkGraphs(
            [nn.Linear(4, 4)],
            [1],
            backend=RecorderBackend(),
            agree=ranks.rank(rank),
            takes_misfits=True,
        )
        plan = StepPlan(misfit="", digest=7 + rank)
        if announces:
            graphs.announce(plan)
        with (
            pytest.raises(ConfigError, match="different plans for this step"),
            graphs.step(1, plan=StepPlan() if announces else plan),
        ):
            pass
        refused.append(rank)

    run_ranks(2, step)
    assert sorted(refused) == [0, 1]


@pytest.fixture
def groups(one_rank: Any) -> ContextGroups:
    """Make the groups of one rank, with stand-ins for the larger sizes."""
    result = ContextGroups([0], {1: None})
    result._groups = {4: object(), 2: object(), 1: None}
    return result


def test_banks_are_of_sizes(groups: ContextGroups) -> None:
    banks = PackedBanks.of_limits(LIMITS, groups)
    assert [(key.size, key.num_tokens) for key in banks.keys] == [(4, 8), (2, 8), (1, 8)]
    assert repr(banks.keys[1]) == "CP 2 with 8 tokens a rank"
    lengths = [30, 7, 3, 9]
    schedule = schedule_contexts(lengths, LIMITS)
    assert [m.size for m in schedule.of_rank(0)] == [4, 2]
    keys = banks.of_schedule(schedule, lengths)
    assert [(key.size, key.num_tokens) for key in keys] == [(4, 8), (2, 8)]
    short = schedule_contexts([5, 2, 3, 1], LIMITS)
    keys = banks.of_schedule(short, [5, 2, 3, 1])
    assert [(key.size, key.num_tokens) for key in keys] == [(2, 8)]
    with pytest.raises(ConfigError, match=r"bank of 2 ranks does not hold .* of \[30\] tokens"):
        banks.of_schedule(short, [30, 30, 30, 30])


def test_sizes_that_cannot_be(groups: ContextGroups) -> None:
    with pytest.raises(TopologyError, match="no context-parallel group of 8"):
        groups.of(8)
    with pytest.raises(TopologyError, match="cannot be divided into groups of 2"):
        ContextGroups.create([[0]], [2])
    groups._groups[2] = torch.distributed.group.WORLD
    with pytest.raises(TopologyError, match=r"ranks \[0\] has no group of routers among"):
        groups.of_routers(groups.of(2))


def test_a_key_is_its_group(groups: ContextGroups) -> None:
    banks = PackedBanks.of_limits(LIMITS, groups)
    same = PackedBank(LIMITS.shape(4), groups.of(4))
    other = replace(same, group=object(), name="CP 4 of others")
    assert same == banks.keys[0]
    assert hash(same) == hash(banks.keys[0])
    assert other not in banks.keys


def test_the_announcements_of_a_step(groups: ContextGroups) -> None:
    banks = PackedBanks.of_limits(LIMITS, groups)
    banks.keys = tuple(key for key in banks.keys if key.size in (4, 1))
    four, two, one = (PackedBank(LIMITS.shape(size), groups.of(size)) for size in (4, 2, 1))

    def missing(keys: Any) -> str:
        return "" if set(keys) <= set(banks.keys) else "not captured"

    plans = StepPlans(banks, 3, missing_graphs=missing)

    def begin(keys: Any, misfit: str, count: int) -> tuple[str | None, Any]:
        plan = plans.plan(StepInputs(None, misfit, None, keys), {"num_microbatches": count})
        assert plan.digest == digest_of_plan(plan.banks)
        return plan.misfit, plan.banks

    def announce(keys: Any) -> str:
        misfit, digest = plans.announce(StepInputs(contexts=keys))
        assert digest == digest_of_plan(keys)
        return misfit

    assert begin([four, one], "", 2) == ("", [four, one])
    assert begin([two, one], "", 2) == ("not captured", [two, one])
    assert begin([two], "mine", 1) == ("mine", [two])
    assert announce([two]) == "not captured"
    with pytest.raises(SlotError, match="rank 3: the next step is already announced"):
        announce([four])
    assert begin(None, "", 1) == (None, [two])
    # A schedule's digest stays with its list of banks, even if that changes.
    banks_of_step = ScheduledBanks([four], 7)
    announce(banks_of_step)
    banks_of_step.append(two)
    assert digest_of_plan(begin(None, "", 1)[1]) == 7
    assert digest_of_plan(begin(banks_of_step, "", 2)[1]) == 7
    assert digest_of_plan([four]) == digest_of_plan(None) == 0
    assert announce([four, one]) == ""
    with pytest.raises(ConfigError, match=r"rank 3: .*has 2 microbatches.*announced: 2"):
        begin([one, four], "", 2)
    assert begin([four, one], "", 2) == (None, [four, one])  # the announcement still holds
    # Banks of the same sizes for other documents.
    announce(ScheduledBanks([one], 7))
    with pytest.raises(ConfigError, match="their schedules must be the same"):
        begin(ScheduledBanks([one], 8), "", 1)
    begin(ScheduledBanks([one], 7), "", 1)
    for call in (lambda: begin(None, "", 1), lambda: announce(None)):
        with pytest.raises(ConfigError, match="step has no contexts"):
            call()
    with pytest.raises(ConfigError, match="3 microbatches, but contexts for 1"):
        begin([four], "", 3)
    assert begin([replace(four, group=object())], "", 1)[0] == "not captured"
