"""Receives directly into slots: a middle stage copies nothing, and no number changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chunkgraph.engine import StepMode
from chunkgraph.megatron import receive
from chunkgraph.megatron.core.p2p import Direction
from chunkgraph.megatron.pipeline.choice import PipelinePlace
from chunkgraph.megatron.receive import ReceiveOrder, SlotReceiver

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

_COUNTS = [2, 1, 4]
_INTERLEAVED_COUNTS = [3, 3, 6]
_OVERLAP = {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": False}
_FLUSH = {**_OVERLAP, "overlap_p2p_comm_warmup_flush": True}


@pytest.fixture
def make_case(make_config: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def make(
        pp: int,
        vpp: int | None = None,
        counts: Sequence[int] = _COUNTS,
        group_size: int | None = None,
        shared_slots: bool = False,
        **others: Any,
    ) -> dict[str, Any]:
        pipeline: dict[str, Any] = {
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
        }
        if group_size is not None:
            pipeline["microbatch_group_size_per_vp_stage"] = group_size
        return {
            "probe": "receive",
            "config": make_config(
                model={"num_layers": pp * (vpp or 1), "hidden_dropout": 0.1},
                pipeline=pipeline,
                train={"num_microbatches": list(counts)},
                capture={"verify": "poison", "shared_slots": shared_slots},
            ),
            **others,
        }

    return make


def _replayed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all steps except the eager one, where all receives are Megatron's."""
    eager, *steps = result["steps"]
    assert result["equal"]
    assert eager["replays"] == eager["in_place"] == eager["copied"] == 0
    assert all(step["replays"] > 0 for step in steps)
    return steps


@pytest.mark.slow
def test_three_ranks(run_cases: Callable[..., Any], make_case: Callable[..., Any]) -> None:
    one_f_one_b = {
        "own_communicator": make_case(3, communicator="own"),
        "in_place": make_case(3),
        "unknown_schedule": make_case(3, hides_schedule=True),
    }
    interleaved = {
        "interleaved": make_case(3, 2, _INTERLEAVED_COUNTS),
        "overlap": make_case(3, 2, _INTERLEAVED_COUNTS, megatron=_OVERLAP),
    }
    results = run_cases({**one_f_one_b, **interleaved}, 3)
    _check_1f1b(results["in_place"], is_whole_chunk=False)
    _check_off(results["unknown_schedule"], "not Megatron's pipeline schedule")
    _check_off(results["own_communicator"], "the caller's own communicator", ["Own"])
    _check_interleaved(results, interleaved)


@pytest.mark.slow
def test_three_ranks_with_other_options(
    run_cases: Callable[..., Any], make_case: Callable[..., Any]
) -> None:
    shared = {"shared_slots": True}
    one_f_one_b = {
        "own_groups": make_case(3, communicator="plain"),
        "whole_chunk": make_case(3, scope="chunk"),
    }
    interleaved = {
        "flush": make_case(3, 2, _INTERLEAVED_COUNTS, megatron=_FLUSH),
        "shared": make_case(3, 2, _INTERLEAVED_COUNTS, **shared),
        "shared_overlap": make_case(3, 2, _INTERLEAVED_COUNTS, megatron=_OVERLAP, **shared),
    }
    results = run_cases({**one_f_one_b, **interleaved}, 3)
    for name in one_f_one_b:
        _check_1f1b(results[name], is_whole_chunk=name == "whole_chunk")
    _check_interleaved(results, interleaved)


def _check_interleaved(results: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        _check_interleaved_case(
            results[name],
            is_overlapped=name not in ("interleaved", "shared"),
            # With as many slots as microbatches in flight, no slot is free for an early receive.
            least=0 if name == "shared_overlap" else 0.5,
        )


def _check_1f1b(ranks: list[dict[str, Any]], *, is_whole_chunk: bool) -> None:
    """Check that all receives are in place, also with fewer microbatches than slots."""
    for rank, result in enumerate(ranks):
        steps = _replayed(result)
        assert result["communicators"] == []
        for step, count in zip(steps, _COUNTS[1:], strict=True):
            assert step["off_because"] == ""
            assert step["copied"] == step["inputs_elsewhere"] == 0
            assert step["in_place"] == count * ((rank > 0) + (rank < 2))
            assert step["inputs_in_slots"] == count * (rank > 0)
        for step in steps[1:]:  # the first one captures
            # Inputs and output gradients that eager layers computed are copied.
            assert (step["copies"] == 0) == (rank == 1 or is_whole_chunk)


def _check_off(ranks: list[dict[str, Any]], reason: str, communicators: Sequence[str] = ()) -> None:
    for rank, result in enumerate(ranks):
        assert result["communicators"] == list(communicators)
        for step, count in list(zip(_replayed(result), _COUNTS[1:], strict=True))[1:]:
            assert step["off_because"].startswith(reason)
            assert step["in_place"] == step["inputs_in_slots"] == 0
            if rank == 1:
                # The input, its gradient and that of the output.
                assert step["copies"] == 3 * count


def _check_interleaved_case(
    ranks: list[dict[str, Any]], *, is_overlapped: bool, least: float
) -> None:
    """Check receives in place for every chunk; overlapped sends and early receives are copied."""
    for rank, result in enumerate(ranks):
        steps = list(zip(_replayed(result), _INTERLEAVED_COUNTS[1:], strict=True))
        for step, count in steps:
            num_receives = (4 if rank == 1 else 3) * count
            assert step["off_because"] == ""
            assert step["in_place"] + step["copied"] == num_receives
            assert step["in_place"] > num_receives * least
            assert step["inputs_in_slots"] > 0
            assert is_overlapped or step["copied"] == step["inputs_elsewhere"] == 0
        if rank == 1:
            for step, count in steps[1:]:
                num_sent = 2 * count if is_overlapped else 0
                assert step["copies"] == num_sent + step["copied"]


@pytest.mark.slow
def test_groups_larger_than_the_pipeline(
    run_cases: Callable[..., Any], make_case: Callable[..., Any]
) -> None:
    """The first rank receives long before its forward, and the last group is smaller."""
    counts = [5, 3, 8]
    cases = {
        "overlap": make_case(2, 2, counts, group_size=3, megatron=_OVERLAP),
        "plain": make_case(2, 2, counts, group_size=3),
        "flush": make_case(2, 2, counts, group_size=3, megatron=_FLUSH),
    }
    for name, ranks in run_cases(cases, 2).items():
        for result in ranks:
            for step, count in zip(_replayed(result), counts[1:], strict=True):
                assert step["in_place"] + step["copied"] == 3 * count, name
                assert step["in_place"] > 0, name


def test_order_of_receives() -> None:
    def order(rank: int, num_microbatches: int, num_chunks: int = 2) -> ReceiveOrder:
        place = PipelinePlace(rank, rank, 2, num_chunks, 2)
        return ReceiveOrder.of_megatron(place, num_microbatches)

    assert order(0, 3, 1) == ReceiveOrder(forward=(), backward=(0, 0, 0), num_before=())
    assert order(1, 3, 1) == ReceiveOrder(forward=(0, 0, 0), backward=(), num_before=(0, 1, 2))
    assert order(0, 4) == ReceiveOrder(
        forward=(1, 1, 1, 1), backward=(1, 1, 0, 0, 1, 1, 0, 0), num_before=(2, 3, 6, 7)
    )
    assert order(1, 4) == ReceiveOrder(
        forward=(0, 0, 1, 1, 0, 0, 1, 1), backward=(0, 0, 0, 0), num_before=tuple(range(8))
    )


class _Engine:
    """Returns one slot buffer after another until there are none."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []
        self.grads: list[torch.Tensor] = []

    def reserve_input(self, _chunk: int, *, num_before: int) -> torch.Tensor | None:
        return self.free.pop(0) if self.free else None

    def call(self, _chunk: int, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return args[0]

    def reserve_output_grad(self, _chunk: int) -> torch.Tensor | None:
        return self.grads.pop(0) if self.grads else None


@pytest.fixture
def middle(one_rank: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the receiver of the middle rank of three, in a replayed step of 9 microbatches."""
    from megatron.core.pipeline_parallel import schedules

    monkeypatch.setattr(receive, "make_communicator", lambda *_: "a communicator")
    config = SimpleNamespace(overlap_p2p_comm=False)
    engine = _Engine()
    place = PipelinePlace(1, 1, 3, 1, 3)
    receiver = SlotReceiver(engine, place, config, lends_input_grads=[True])  # type: ignore[arg-type]
    schedule = schedules.forward_backward_pipelining_without_interleaving
    keywords = {"num_microbatches": 9, "model": [torch.nn.Identity()]}
    assert receiver.begin_step(StepMode.EAGER, schedule, keywords) is keywords
    assert receiver.take(Direction.FORWARD, (2,), torch.float32) is None
    result = receiver.begin_step(StepMode.REPLAY, schedule, keywords)
    assert result["p2p_communicator"] == "a communicator"
    assert result["pg_collection"].pp.size() == 1
    return SimpleNamespace(
        engine=engine, receiver=receiver, call=lambda hidden: receiver.call(0, (hidden,), {})
    )


def test_no_slot_is_reserved_past_a_microbatch_that_has_none(middle: Any) -> None:
    """A slot that is freed in between would go to the wrong forward."""
    receiver, buffers = middle.receiver, [torch.zeros(2) for _ in range(3)]

    def receive() -> torch.Tensor | None:
        return receiver.take(Direction.FORWARD, (2,), torch.float32)

    assert receive() is None
    middle.engine.free = list(buffers)
    assert receive() is None
    middle.call(torch.ones(2))
    assert receive() is None  # one of the two is still waiting
    middle.call(torch.ones(2))
    middle.call(torch.ones(2))
    assert receive() is buffers[0]
    assert receive() is buffers[1]
    assert (receiver.num_received_in_place, receiver.num_received_copied) == (2, 3)


@pytest.mark.parametrize(("shape", "dtype"), [((3,), torch.float32), ((2,), torch.bfloat16)])
def test_only_what_megatron_would_allocate(middle: Any, shape: Any, dtype: Any) -> None:
    """Another shape is copied into the slot that stays reserved for its microbatch."""
    receiver, buffers = middle.receiver, [torch.zeros(2) for _ in range(2)]
    middle.engine.free = list(buffers)
    middle.engine.grads = [torch.zeros(2)]
    assert receiver.take(Direction.FORWARD, shape, dtype) is None
    assert receiver.take(Direction.BACKWARD, shape, dtype) is None
    buffer = receiver.take(Direction.FORWARD, (2,), torch.float32)
    assert buffer is buffers[1]
    assert buffer.requires_grad
    assert (receiver.num_received_in_place, receiver.num_received_copied) == (1, 2)


def test_gradients_that_lose_their_order_are_copied(middle: Any) -> None:
    def receive() -> torch.Tensor | None:
        return middle.receiver.take(Direction.BACKWARD, (2,), torch.float32)

    grads = middle.engine.grads = [torch.zeros(2) for _ in range(2)]
    received = receive()
    assert received.requires_grad
    assert len(grads) == 1
    grads.clear()
    assert receive() is None  # no forward is waiting for one
    grads.append(torch.zeros(2))
    assert receive() is None
