"""A question posted ahead of time answers the same later question, and no other one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from chunkgraph.engine import CaptureOptions, ChunkGraphs, EagerReason, StepMode
from chunkgraph.engine.decide.agreement import Agreement
from chunkgraph.graphs import RecorderBackend


class Ranks:
    """This rank among ranks that always answer ``others``; records its questions."""

    def __init__(self, others: Sequence[int] = (0, 0)) -> None:
        self.others = list(others)
        self.questions: list[list[int]] = []
        self.num_waits = 0

    def __call__(self, values: Sequence[int]) -> list[int]:
        return self.start(values)()

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        self.questions.append(list(values))
        answer = [max(a, b) for a, b in zip(values, self.others, strict=True)]

        def wait() -> list[int]:
            self.num_waits += 1
            return answer

        return wait


def test_the_same_question_is_asked_once() -> None:
    ranks = Ranks(others=(3, 0))
    agreement = Agreement(ranks)
    agreement.post("kind", [1, 1])
    assert ranks.num_waits == 0
    assert agreement.answer("kind", [1, 1]) == [3, 1]
    assert ranks.questions == [[1, 1]]
    assert agreement.answer("kind", [1, 1]) == [3, 1]
    assert len(ranks.questions) == 2


@pytest.mark.parametrize(("kind", "values"), [("other", [1, 1]), ("kind", [2, 1])])
def test_another_question_is_asked_and_the_old_one_ends(kind: str, values: list[int]) -> None:
    ranks = Ranks(others=(0, 5))
    agreement = Agreement(ranks)
    agreement.post("kind", [1, 1])
    assert agreement.answer(kind, values) == [values[0], 5]
    assert ranks.questions == [[1, 1], values]
    assert ranks.num_waits == 2


def test_an_expired_question_is_asked_again_though_it_is_the_same_here() -> None:
    """Another rank may have another question by now, and asks again."""
    ranks = Ranks()
    agreement = Agreement(ranks)
    agreement.post("kind", [1, 1])
    agreement.expire()
    assert agreement.answer("kind", [1, 1]) == [1, 1]
    assert ranks.questions == [[1, 1], [1, 1]]
    assert ranks.num_waits == 2


def _graphs(ranks: Ranks, **options: Any) -> ChunkGraphs:
    return ChunkGraphs(
        [torch.nn.Linear(4, 4)],
        [1],
        options=CaptureOptions(**options),
        backend=RecorderBackend(),
        agree=ranks,
    )


def _step(graphs: ChunkGraphs, *, forward_only: bool = False) -> None:
    with graphs.step(1, forward_only=forward_only), torch.set_grad_enabled(not forward_only):
        result = graphs.callables[0](torch.ones(2, 4))
        if not forward_only:
            result.sum().backward()


def test_training_steps_ask_ahead_and_another_rank_still_decides() -> None:
    ranks = Ranks()
    graphs = _graphs(ranks)

    step = functools.partial(_step, graphs)
    num_questions = lambda: len(ranks.questions)  # noqa: E731
    step()  # warmup: asks, and posts the next step's question
    assert num_questions() == 2
    ranks.others = [0]  # whether the session failed on another rank
    original, ranks.start = ranks.start, lambda values: lambda: [0] * len(values)  # type: ignore[method-assign,assignment]
    step()
    ranks.start = original  # type: ignore[method-assign]
    assert graphs.counters.capture_sessions == 1
    ranks.others = [0, 0]
    num_before = num_questions()
    step()
    assert graphs.counters.replayed_steps == 2
    assert num_questions() == num_before + 1  # only for the step after it
    ranks.others = [EagerReason.REQUESTED, 0]  # another rank wants eager steps
    step()  # its answer came before
    assert graphs.counters.replayed_steps == 3
    step()
    assert graphs.counters.fallbacks["requested"] == 1
    ranks.others = [0, 0]
    step(forward_only=True)
    assert graphs.counters.fallbacks["forward only"] == 1


class WithReason(Ranks):
    """The other ranks have their own reason for an eager step, and no part in captures."""

    reason = EagerReason.NONE

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        is_of_step = len(values) == 2
        self.others = [int(self.reason) if is_of_step else 0, 0][: len(values)]
        return super().start(values)


@pytest.mark.parametrize("is_here", [True, False])
def test_memory_that_was_replaced_on_one_rank_makes_all_capture_again(is_here: bool) -> None:
    ranks = WithReason()
    graphs = _graphs(ranks)
    is_replaced, released = False, []

    def release() -> None:
        released.append(graphs.mode)
        ranks.reason = EagerReason.NONE  # the other ranks release theirs too
        graphs.release()

    graphs.watch_memory(lambda: is_replaced, release)

    step = functools.partial(_step, graphs)

    for _ in range(3):
        step()
    assert (graphs.counters.capture_sessions, graphs.counters.replayed_steps) == (1, 2)
    is_replaced = is_here
    step(forward_only=True)
    if not is_here:
        ranks.reason = EagerReason.MEMORY_REPLACED
    step()
    assert released == [StepMode.OUTSIDE]
    assert graphs.counters.fallbacks["memory of the graphs was replaced"] == 1
    is_replaced = False
    for _ in range(2):
        step()
    assert (graphs.counters.capture_sessions, graphs.counters.replayed_steps) == (2, 4)
    assert len(released) == 1
