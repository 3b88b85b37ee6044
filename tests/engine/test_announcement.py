"""All ranks run a step eagerly that does not fit on one of them, whenever each announces it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from thread_ranks import Agreeing, Starting, run_ranks

from chunkgraph.engine import CaptureOptions, ChunkGraphs, StepPlan
from chunkgraph.errors import SlotError
from chunkgraph.graphs import RecorderBackend

pytestmark = pytest.mark.usefixtures("no_collector")


# The steps of each rank: F fits, M does not, E is an evaluation.
Plan = Sequence[str]


def _run(
    plans: Sequence[Plan], announcing: Sequence[str], withdrawing: int | None = None
) -> tuple[list[list[str]], list[Any]]:
    """Return the modes of all ranks' steps, announced inside the step before, after it, or never.

    The first rank announces step number ``withdrawing`` as the opposite of what it is, the others
    as what it is; all withdraw these announcements.
    """
    group = Agreeing(len(plans))
    modes: list[list[str]] = [[] for _ in plans]
    engines: list[Any] = [None] * len(plans)

    def rank_main(rank: int) -> None:
        graphs = engines[rank] = ChunkGraphs(
            [torch.nn.Linear(4, 4)],
            [1],
            options=CaptureOptions(),
            backend=RecorderBackend(),
            agree=Starting(group, rank),
            takes_misfits=True,
        )
        plan, when = plans[rank], announcing[rank]

        def announce(k: int) -> None:
            later = [kind for kind in plan[k + 1 :] if kind != "E"]
            if plan[k] != "E" and later:
                does_fit = (later[0] == "F") != (rank == 0 and k + 1 == withdrawing)
                graphs.announce(StepPlan(misfit="" if does_fit else "too many"))

        for k, kind in enumerate(plan):
            # The others were announced.
            is_announced = (k in (0, withdrawing) or when == "never") and kind != "E"
            if k == withdrawing:
                graphs.withdraw()
            misfit = ("too many" if kind == "M" else "") if is_announced else None
            rows, shape = (3, "other") if kind == "M" else (2, "usual")
            with (
                graphs.step(
                    1, shape_key=shape, forward_only=kind == "E", plan=StepPlan(misfit=misfit)
                ) as mode,
                torch.set_grad_enabled(kind != "E"),
            ):
                modes[rank].append(mode.value)
                if when == "inside":
                    announce(k)
                result = graphs.callables[0](torch.ones(rows, 4))
                if kind != "E":
                    result.sum().backward()
            if when == "after":
                announce(k)

    run_ranks(len(plans), rank_main)
    return modes, engines


@pytest.mark.parametrize("second", ["inside", "after", "never"])
@pytest.mark.parametrize("first", ["inside", "after", "never"])
def test_one_rank_that_does_not_fit_takes_all_along(first: str, second: str) -> None:
    modes, engines = _run(["FFMFMFF", "FFFFMFF"], [first, second])
    assert modes[0] == modes[1]
    assert modes[0] == ["eager", "replay", "eager", "replay", "eager", "replay", "replay"]
    fallbacks = {"capture warmup": 1, "packing overflow": 2}
    assert [dict(e.counters.fallbacks) for e in engines] == [fallbacks, fallbacks]
    assert dict(engines[0].counters.packing_overflows) == {"too many": 2}
    assert dict(engines[1].counters.packing_overflows) == {"on another rank": 1, "too many": 1}


@pytest.mark.parametrize("when", ["inside", "after", "never"])
def test_warmup_waits_for_steps_that_fit(when: str) -> None:
    """A step that does not fit on one rank is a sample on none."""
    modes, engines = _run(["MFFF", "FMFF"], [when, "never"])
    assert modes == [["eager", "eager", "eager", "replay"]] * 2
    assert all(
        e.counters.fallbacks == {"packing overflow": 2, "capture warmup": 1} for e in engines
    )


@pytest.mark.parametrize("others", ["after", "inside", "never"])
@pytest.mark.parametrize("first", ["after", "inside"])
@pytest.mark.parametrize("second", ["M", "F"])
def test_what_all_ranks_withdraw_is_asked_again(second: str, first: str, others: str) -> None:
    """Also after an answer that does not hold for the coming step."""
    plans = ["FF" + second + "F", "FFFF"]
    modes, engines = _run(plans, [first, others], withdrawing=2)
    steps = ["eager", "replay", "eager" if second == "M" else "replay", "replay"]
    assert modes == [steps, steps]
    counts = [e._decider.agreement._agree.num_questions for e in engines]
    assert counts[0] == counts[1]


def _alone() -> ChunkGraphs:
    return ChunkGraphs([torch.nn.Linear(4, 4)], [1], backend=RecorderBackend(), takes_misfits=True)


@pytest.mark.parametrize(("announced", "misfit"), [("", "too many"), ("too many", "")])
def test_what_was_announced_binds(announced: str, misfit: str) -> None:
    graphs = _alone()
    graphs.announce(StepPlan(misfit=announced))
    with (
        pytest.raises(SlotError, match="announced with inputs that"),
        graphs.step(1, plan=StepPlan(misfit=misfit)),
    ):
        pass


def test_the_plan_that_was_announced_binds() -> None:
    graphs = _alone()
    graphs.announce(StepPlan(misfit="", digest=7))
    message = r"another plan \(digest 8\) than the announced one \(7\)"
    with pytest.raises(SlotError, match=message), graphs.step(1, plan=StepPlan(digest=8)):
        pass
    with graphs.step(1, plan=StepPlan(digest=7)):
        pass
    graphs.announce(StepPlan(misfit="", digest=7))
    with graphs.step(1, plan=StepPlan(digest=0)):
        pass


def test_a_step_is_announced_once_and_never_left_open() -> None:
    graphs = _alone()
    with pytest.raises(SlotError, match="neither announced"), graphs.step(1):
        pass
    graphs.announce(StepPlan(misfit=""))
    with pytest.raises(SlotError, match="announced already"):
        graphs.announce(StepPlan(misfit=""))
    with pytest.raises(SlotError, match="before announce"):
        graphs.capture([torch.ones(2, 4)])
    plain = ChunkGraphs([torch.nn.Linear(4, 4)], [1], backend=RecorderBackend())
    with pytest.raises(ValueError, match="takes_misfits"):
        plain.announce(StepPlan(misfit=""))


def test_announcements_are_taken_back_between_steps() -> None:
    graphs = _alone()
    graphs.announce(StepPlan(misfit="too many"))
    graphs.withdraw()
    with (
        graphs.step(1, plan=StepPlan(misfit="")),
        pytest.raises(SlotError, match=r"withdraw\(\) was called inside a step"),
    ):
        graphs.withdraw()
    graphs.announce(StepPlan(misfit=""))  # there is no earlier announcement left
    with graphs.step(1):
        pass
