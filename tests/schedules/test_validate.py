"""Broken schedules are refused, with a drawing of the place."""

from __future__ import annotations

import dataclasses
import random

import pytest

from chunkgraph.errors import ScheduleError
from chunkgraph.schedules import (
    Action,
    Op,
    Schedule,
    build_schedule,
    validate,
    with_transfers,
)

CASES = {
    "gpipe": build_schedule("gpipe", num_ranks=3, num_microbatches=4),
    "1f1b": build_schedule("1f1b", num_ranks=3, num_microbatches=5),
    "interleaved": build_schedule(
        "interleaved", num_ranks=2, num_chunks=2, num_microbatches=5, group_size=3
    ),
    "zb-h1": build_schedule("zb-h1", num_ranks=3, num_microbatches=4),
    "interleaved-zb": build_schedule(
        "interleaved-zb", num_ranks=2, num_chunks=2, num_microbatches=5, group_size=3
    ),
    "zb-v": build_schedule("zb-v", num_ranks=3, num_chunks=2, num_microbatches=3),
    "dualpipe-v": build_schedule("dualpipe-v", num_ranks=2, num_chunks=2, num_microbatches=5),
}
CASES |= {f"{name}+comm": with_transfers(built) for name, built in CASES.items()}


@pytest.fixture(params=CASES, ids=str)
def built(request):
    return CASES[request.param]


def edited(built, edit):
    actions = [list(row) for row in built.actions]
    edit(actions)
    return dataclasses.replace(built, actions=tuple(map(tuple, actions)))


def places(built):
    return [(rank, at) for rank, row in enumerate(built.actions) for at in range(len(row))]


def test_dropping_any_action_is_caught(built):
    for rank, at in places(built):
        broken = edited(built, lambda rows, rank=rank, at=at: rows[rank].pop(at))
        with pytest.raises(ScheduleError, match="->"):
            validate(broken)


def test_repeating_or_moving_any_action_is_caught(built):
    for rank, at in places(built):
        action = built.actions[rank][at]
        broken = edited(built, lambda rows, r=rank, a=action: rows[r].append(a))
        with pytest.raises(ScheduleError, match=f"{action} runs twice"):
            validate(broken)

        def move(rows, rank=rank, at=at):
            rows[(rank + 1) % len(rows)].append(rows[rank].pop(at))

        with pytest.raises(ScheduleError, match=f"belongs on rank {rank}"):
            validate(edited(built, move))


def can_run(built):
    """A slow, separate check: repeatedly run any action whose inputs exist and messages match."""
    done, at, channels = set(), [0] * built.num_ranks, {}
    last = built.num_stages - 1

    def talks(s, other):
        return built.has_communication and built.rank_of(s) != built.rank_of(other)

    def ready(action):
        s, m = action.stage, action.microbatch
        grad_above = {Action(op, s + 1, m) for op in (Op.B, Op.I)}
        own_grad = {Action(op, s, m) for op in (Op.B, Op.I)}
        if action.op is Op.F:
            source = Action(Op.RECV_F, s, m) if talks(s, s - 1) else Action(Op.F, s - 1, m)
            return s == 0 or source in done
        if action.op.gives_input_grad:
            source = {Action(Op.RECV_B, s, m)} if talks(s, s + 1) else grad_above
            return Action(Op.F, s, m) in done and (s == last or bool(source & done))
        if action.op in (Op.W, Op.SEND_B):
            return bool(own_grad & done)
        if action.op is Op.SEND_F:
            return Action(Op.F, s, m) in done
        forward = action.op is Op.RECV_F
        sender = built.rank_of(s - 1 if forward else s + 1)
        queue = channels.get((forward, sender, built.rank_of(s)), [])
        return bool(queue) and queue[0] == (s, m)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(built.actions):
            while at[rank] < len(row) and ready(row[at[rank]]):
                action = row[at[rank]]
                if action.op in (Op.SEND_F, Op.SEND_B):
                    forward = action.op is Op.SEND_F
                    to = (action.stage + (1 if forward else -1), action.microbatch)
                    channels.setdefault((forward, rank, built.rank_of(to[0])), []).append(to)
                if action.op in (Op.RECV_F, Op.RECV_B):
                    forward = action.op is Op.RECV_F
                    sender = built.rank_of(action.stage + (-1 if forward else 1))
                    channels[forward, sender, rank].pop(0)
                done.add(action)
                at[rank] += 1
                moved = True
    return all(i == len(row) for i, row in zip(at, built.actions, strict=True))


def test_random_reorderings_are_judged_as_a_separate_check_judges_them(built):
    rng = random.Random(7)
    verdicts = set()
    for _ in range(150):

        def shuffle(rows):
            for _ in range(rng.randint(1, 3)):
                row = rng.choice(rows)
                i = rng.randrange(len(row) - 1)
                j = min(len(row) - 1, i + rng.randint(1, 3))
                row[i], row[j] = row[j], row[i]

        changed = edited(built, shuffle)
        expected = can_run(changed)
        try:
            validate(changed)
        except ScheduleError:
            accepted = False
        else:
            accepted = True
        assert accepted == expected, changed.to_csv()
        verdicts.add(accepted)
    assert False in verdicts


def test_deadlock_names_every_waiting_rank():
    # Each rank alone is valid; together they wait in a cycle.
    built = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ScheduleError, match="deadlock") as error:
        validate(built)
    assert "rank 0 at 0B0 (position 1) waits for the input grad of stage 1" in str(error.value)
    assert "rank 1 at 1F1 (position 0) waits for the output of stage 0" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0I0,0W0", "must be one B, or one I and one W, but is B and I and W"),
        ("0F0,0I0", "but is I"),
        ("0F0", "but is none"),
        ("0B0", "there is no F"),
        ("0F0,0SEND_F0,0B0", "SEND_F has no stage at its other end"),
    ],
)
def test_incomplete_work(text, message):
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule.from_csv(text))


def test_a_file_of_ones_own_is_refused_with_its_row():
    """Every kind of mistake in a file has one message, with the row and an arrow."""
    rows = build_schedule("zb-v", num_ranks=2, num_chunks=2, num_microbatches=4)
    rows = [line.split(",") for line in with_transfers(rows).to_csv().splitlines()]

    def refused(edit, match):
        changed = [list(row) for row in rows]
        edit(changed)
        text = "\n".join(map(",".join, changed))
        with pytest.raises(ScheduleError, match=match) as error:
            validate(Schedule.from_csv(text))
        assert "->" in str(error.value)

    def swap(row, one, other):
        def edit(changed):
            cells = changed[row]
            i, j = cells.index(one), cells.index(other)
            cells[i], cells[j] = cells[j], cells[i]

        return edit

    def first(row, cell):
        return lambda changed: changed[row].insert(0, changed[row].pop(changed[row].index(cell)))

    shown = r"3I0 runs before 3F0, which it needs \(row 1 as CSV\)\n  rank 0: \.\.\. .*-> 3I0 "
    refused(swap(0, "3F0", "3I0"), shown)
    refused(swap(1, "1I0", "1W0"), r"1W0 runs before 1I0, which it needs \(row 2 as CSV\)")
    refused(lambda c: c[1].remove("1RECV_F0"), r"microbatch 0: missing RECV_F \(row 2 as CSV\)")
    refused(lambda c: c[0].remove("0SEND_F0"), r"microbatch 0: missing SEND_F \(row 1 as CSV\)")
    refused(first(1, "1RECV_F1"), r"1RECV_F1 is received out of order.*\(row 2 as CSV\)")
    refused(first(0, "3RECV_F0"), r"deadlock: rank 0 at 3RECV_F0.*\(row 1 as CSV\)")
