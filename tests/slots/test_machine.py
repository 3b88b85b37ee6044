from __future__ import annotations

import random

import pytest
from drawn_schedules import legal_steps
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import SlotError
from chunkgraph.schedules import Op, build_schedule, legal_counts
from chunkgraph.slots import SlotMachine, assign_slots, plan_slots


@pytest.fixture
def machine():
    return SlotMachine([2, 1], "rank 3")


@pytest.fixture
def running(machine):
    machine.begin_step()
    return machine


def test_the_lowest_free_slot_comes_first():
    machine = SlotMachine([70], "rank 0")
    machine.begin_step()
    assert [machine.acquire_forward(0) for _ in range(70)] == list(range(70))
    for slot in (65, 3, 40):
        machine.begin_backward(0, slot)
        machine.release(0, slot)
    assert [machine.acquire_forward(0) for _ in range(3)] == [3, 40, 65]


def refused(call, *parts):
    with pytest.raises(SlotError) as error:
        call()
    text = str(error.value)
    for part in ("rank 3", "What to do:", "  -> ", *parts):
        assert part in text, text
    return text


def test_no_free_slot(running):
    running.acquire_forward(1)
    text = refused(
        lambda: running.acquire_forward(1),
        "forward chunk 1 microbatch 1",
        "chunk 1 has no free slot; 1 in use",
        "chunk 1 slot 0: microbatch 0, forward done, waits for its backward",
    )
    accepted, arrow = text.splitlines()[-2:]
    assert accepted.strip() == "forward chunk 1 microbatch 0 slot 0"
    assert arrow == "  -> forward chunk 1 microbatch 1"


def test_step_ended_with_slots_in_use(running):
    running.acquire_forward(0)
    refused(running.end_step, "1 slots are still in use", "microbatch 0", "-> end step")
    running.begin_backward(0, 0)
    running.release(0, 0)
    running.end_step()


def test_abort_frees_everything_and_the_next_step_starts_clean(running):
    running.acquire_forward(0)
    running.acquire_forward(1)
    running.begin_backward(0, 0)
    running.abort_step()
    assert running.num_free(0) == 2
    running.abort_step()
    running.begin_step()
    assert running.acquire_forward(0) == 0


def drive(machine, built, rank):
    """Run one step; return the slot of every (stage, microbatch)."""
    taken = {}
    machine.begin_step()
    for action in built.actions[rank]:
        chunk, key = built.chunk_of(action.stage), (action.stage, action.microbatch)
        if action.op is Op.F:
            taken[key] = machine.acquire_forward(chunk)
        if action.op.gives_input_grad:
            machine.begin_backward(chunk, taken[key])
        if action.op.ends_lifetime:
            machine.release(chunk, taken[key])
    machine.end_step()
    return taken


@given(legal_steps(), st.randoms(use_true_random=False))
def test_planned_slots_carry_every_legal_step(case, rng):
    name, sizes, most = case
    rank = rng.randrange(sizes["num_ranks"])
    plan = plan_slots(**sizes, rank=rank, schedule=name, max_num_microbatches=most)
    machine = SlotMachine(plan.slots_per_chunk, f"rank {rank}")
    for count in legal_counts(**sizes, schedule=name).up_to(most)[-4:]:
        built = build_schedule(name, **sizes, num_microbatches=count)
        taken = drive(machine, built, rank)
        expected = assign_slots(built)
        assert taken == {key: expected[key] for key in taken}


@given(legal_steps(), st.randoms(use_true_random=False))
def test_one_slot_less_is_not_enough(case, rng):
    name, sizes, most = case
    rank = rng.randrange(sizes["num_ranks"])
    plan = plan_slots(**sizes, rank=rank, schedule=name, max_num_microbatches=most)
    chunk = rng.randrange(len(plan.slots_per_chunk))
    slots = list(plan.slots_per_chunk)
    if slots[chunk] == 1:
        return
    slots[chunk] -= 1
    machine = SlotMachine(slots, "rank 0")

    def drive_all():
        for count in legal_counts(**sizes, schedule=name).up_to(most):
            drive(machine, build_schedule(name, **sizes, num_microbatches=count), rank)

    with pytest.raises(SlotError, match="has no free slot"):
        drive_all()


@given(st.integers(0, 2**32))
def test_random_calls_agree_with_a_simple_model(seed):
    rng = random.Random(seed)
    counts = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    machine = SlotMachine(counts, "rank 3")
    machine.begin_step()
    model: dict[tuple[int, int], str] = {}
    waiting: list[list[int]] = [[] for _ in counts]
    for _ in range(90):
        chunk = rng.randrange(len(counts))
        slot = rng.randrange(counts[chunk])
        what = rng.choice(["forward", "backward", "defer", "weight", "release"])
        free = [s for s in range(counts[chunk]) if (chunk, s) not in model]
        if what == "forward" and free:
            assert machine.acquire_forward(chunk) == free[0]
            model[chunk, free[0]] = "held"
        elif what == "forward":
            refused(lambda c=chunk: machine.acquire_forward(c))
        elif what == "backward" and model.get((chunk, slot)) == "held":
            machine.begin_backward(chunk, slot)
            model[chunk, slot] = "backward"
        elif what == "backward":
            refused(lambda c=chunk, s=slot: machine.begin_backward(c, s))
        elif what == "defer" and model.get((chunk, slot)) == "backward":
            machine.await_last(chunk, slot)
            model[chunk, slot] = "pending"
            waiting[chunk].append(slot)
        elif what == "defer":
            refused(lambda c=chunk, s=slot: machine.await_last(c, s))
        elif what == "weight" and waiting[chunk]:
            slot = waiting[chunk].pop(0)
            assert machine.begin_last(chunk) == slot
            model[chunk, slot] = "weight"
        elif what == "weight":
            refused(lambda c=chunk: machine.begin_last(c))
        elif model.get((chunk, slot)) in ("backward", "weight"):
            machine.release(chunk, slot)
            del model[chunk, slot]
        else:
            refused(lambda c=chunk, s=slot: machine.release(c, s))


@pytest.fixture
def shared():
    machine = SlotMachine([2, 2], "rank 0", are_shared=True)
    machine.begin_step()
    return machine


def test_chunks_take_shared_slots_from_one_set(shared):
    assert [shared.acquire_forward(1), shared.acquire_forward(0)] == [0, 1]
    assert shared.num_free(0) == shared.num_free(1) == 0
    with pytest.raises(SlotError, match="the rank has no free slot; 2 in use"):
        shared.acquire_forward(1)
    shared.begin_backward(1, 0)
    shared.release(1, 0)
    assert shared.acquire_forward(0) == 0


@pytest.mark.parametrize("call", ["begin_backward", "release"])
def test_a_shared_slot_is_of_the_chunk_that_took_it(shared, call):
    slot = shared.acquire_forward(1)
    if call == "release":
        shared.begin_backward(1, slot)
    with pytest.raises(SlotError, match="holds no microbatch of this chunk"):
        getattr(shared, call)(0, slot)


def test_shared_slots_have_one_number():
    with pytest.raises(SlotError, match="pass equal ones"):
        SlotMachine([2, 1], "rank 0", are_shared=True)
