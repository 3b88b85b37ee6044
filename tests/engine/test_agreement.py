"""A question posted ahead of time answers the same later question, and no other one."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_ranks import Agreeing, run_ranks

import chunkgraph
from chunkgraph.engine import CaptureOptions, ChunkGraphs, EagerReason, StepMode, agreement
from chunkgraph.engine.agreement import (
    Maximum,
    new_group,
    refuse_differences,
    refused_together,
)
from chunkgraph.errors import ConfigError, WorkerError
from chunkgraph.graphs import RecorderBackend


class Ranks:
    """This rank among ranks that always answer ``others``, then the same; records its questions."""

    def __init__(self, others: Sequence[int] = ()) -> None:
        self.others = list(others)
        self.questions: list[list[int]] = []
        self.num_waits = 0

    def __call__(self, values: Sequence[int]) -> list[int]:
        return self.start(values)()

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        self.questions.append(list(values))
        others = [*self.others, *values[len(self.others) :]]
        answer = [max(a, b) for a, b in zip(values, others, strict=False)]

        def wait() -> list[int]:
            self.num_waits += 1
            return answer

        return wait


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
    step()
    assert graphs.counters.capture_sessions == 1
    num_before = num_questions()
    step()
    assert graphs.counters.replayed_steps == 2
    assert num_questions() == num_before + 1  # only for the step after it
    ranks.others = [EagerReason.REQUESTED]  # another rank wants eager steps
    step()  # its answer came before
    assert graphs.counters.replayed_steps == 3
    step()
    assert graphs.counters.fallbacks["requested"] == 1
    ranks.others = []
    step(forward_only=True)
    assert graphs.counters.fallbacks["forward only"] == 1


class WithReason(Ranks):
    """The other ranks have their own reason for an eager step, and no part in captures."""

    reason = EagerReason.NONE

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        self.others = [int(self.reason)] if len(values) == 6 else []
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


def test_memory_that_a_failed_step_replaces_is_noticed() -> None:
    graphs = _graphs(Ranks())
    is_replaced = False
    graphs.watch_memory(lambda: is_replaced, graphs.release)
    for _ in range(2):
        _step(graphs)
    is_replaced = True
    with pytest.raises(KeyError), graphs.step(1):
        raise KeyError
    _step(graphs)
    assert graphs.counters.fallbacks["memory of the graphs was replaced"] == 1


def messages(num_ranks: int, main: Callable[[int, Any], None]) -> list[str]:
    """Return the message that each rank's ``main(rank, agree)`` raises, "" for none."""
    together = Agreeing(num_ranks)
    texts = [""] * num_ranks

    def run(rank: int) -> None:
        try:
            main(rank, together.rank(rank))
        except ConfigError as error:
            texts[rank] = str(error)

    run_ranks(num_ranks, run)
    return texts


def test_an_error_of_one_rank_ends_all() -> None:
    def refuse(rank: int, agree: Any) -> None:
        with refused_together(agree, rank):
            if rank == 1:
                raise ConfigError("stage 1 has no layer.")

    assert messages(3, refuse) == [
        "rank 0 stopped, since another rank cannot go on.\nrank 1: stage 1 has no layer.",
        "stage 1 has no layer.",
        "rank 2 stopped, since another rank cannot go on.\nrank 1: stage 1 has no layer.",
    ]


def test_ranks_that_differ_are_told_what_differs() -> None:
    def compare(rank: int, agree: Any) -> None:
        own = {"seed": 7, "lr": 0.5 if rank == 2 else 0.1, "spec": "a\n  b"}
        refuse_differences(agree, rank, own | ({"extra": 1} if rank == 2 else {}))

    texts = messages(3, compare)
    assert len(set(texts)) == 1
    assert "\n  lr: 0.5 on rank 2, 0.1 on rank 0\n  extra: 1 on rank 2, missing on" in texts[0]
    assert "seed" not in texts[0]
    assert "spec" not in texts[0]
    assert (
        messages(3, lambda rank, agree: refuse_differences(agree, rank, {"a": "b: c"})) == [""] * 3
    )


def test_groups_have_the_timeout_of_the_job(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    timeout = timedelta(seconds=17)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    try:
        backend: Any = new_group([0])._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timeout
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_of_gloo", [True, False])
def test_errors_of_a_programs_own_connections_are_not_those_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_gloo: bool
) -> None:
    """A step raises what its data loader raises; a lost peer is named with silent ranks."""
    text = "Connection reset by peer"
    graphs = ChunkGraphs([torch.nn.Linear(2, 2)], [1])
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(agreement, "_SILENCE", timedelta(seconds=0.2))
    try:
        with pytest.raises(RuntimeError) as caught, graphs.step(1):
            raise RuntimeError(f"[gloo/pair.cc:534] {text}" if is_of_gloo else text)
    finally:
        dist.destroy_process_group()
    assert isinstance(caught.value, WorkerError) is is_of_gloo
    if is_of_gloo:
        assert str(caught.value).endswith("No word from rank 1: stopped, hung or ended.")


def test_one_function_makes_all_groups() -> None:
    """Another one would lack the timeout of the job."""
    folder = Path(chunkgraph.__file__).parent
    made = re.compile(r"dist\.new_\w*group|new_subgroups|split_group")
    files = [p for p in folder.rglob("*.py") if made.search(p.read_text(encoding="utf-8"))]
    assert [str(p.relative_to(folder)) for p in files] == ["engine/agreement.py"]


def test_an_error_between_collectives_reaches_ranks_that_wait_in_the_block() -> None:
    def refuse(rank: int, agree: Any) -> None:
        with refused_together(agree, rank) as meet:
            meet()
            if rank == 1:
                raise ConfigError("stage 1 has no layer.")
            meet()
            raise AssertionError("a rank went on to its collective")

    texts = messages(2, refuse)
    assert texts[0].endswith("another rank cannot go on.\nrank 1: stage 1 has no layer.")
    assert texts[1] == "stage 1 has no layer."


def test_a_maximum_outlives_the_job_that_began_again(tmp_path: Any) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(new_group(backend="gloo"))
        return made[-1]

    def begin(number: int) -> None:
        store = torch.distributed.FileStore(str(tmp_path / f"store{number}"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    begin(0)
    maximum = Maximum(make(), make)
    assert maximum([3, 4]) == [3, 4]
    torch.distributed.destroy_process_group()
    begin(1)
    assert maximum([5, 6]) == [5, 6]
    assert len(made) == 2
    maximum.close()
    torch.distributed.destroy_process_group()


class WithoutGraphs(Ranks):
    """The graphs of another rank are gone once ``are_gone``."""

    are_gone = False

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        self.others = [0, 1] if self.are_gone and len(values) == 6 else []
        return super().start(values)


def test_ranks_capture_again_together_if_memory_of_one_moved() -> None:
    ranks = WithoutGraphs()
    graphs = _graphs(ranks, on_moved_memory="recapture")
    for _ in range(2):
        _step(graphs)
    ranks.are_gone = True
    _step(graphs)
    assert (graphs.counters.capture_sessions, graphs.counters.replayed_steps) == (2, 2)
    assert graphs.counters.fallbacks == {"capture warmup": 1}


def test_a_forward_only_step_is_eager_if_another_rank_has_no_graphs() -> None:
    ranks = WithReason()
    graphs = _graphs(ranks)
    none, others = EagerReason.NONE, (EagerReason.FORWARD_ONLY, EagerReason.MODEL_CHANGED)
    for ranks.reason in (none, none, *others, none):
        _step(graphs, forward_only=True)
    assert graphs.counters.fallbacks == {"forward only": 2, "model changed": 1}
    assert graphs.forward_only.counters.replayed_steps == 2
