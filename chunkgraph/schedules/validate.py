"""Check that a schedule can run and does all work exactly once.

The rules, in the order in which they are checked: every action is on an existing stage of its rank;
every (stage, microbatch) has one F and either one B or one I with one W, and with communication
every message has one send and one receive; on each rank no action runs before its inputs; the
messages of a channel are received in the order in which they are sent; no rank waits forever.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from chunkgraph.errors import ScheduleError
from chunkgraph.schedules.action import Action, Op
from chunkgraph.schedules.events import Event, event_of, needs_of, run_in_order
from chunkgraph.schedules.schedule import Schedule

_NUM_SHOWN = 4
"""Actions that a message shows on either side of the one at fault."""
_BACKWARDS = {Op.B, Op.I, Op.W}
_RECEIVED_BY = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}


def validate(schedule: Schedule) -> None:
    """Check a schedule, with or without communication actions.

    Args:
        schedule: any schedule, such as one read from a CSV file.

    Raises:
        ScheduleError: a rule is broken. The message names the rank, its row in a CSV file and the
            action, and shows the surrounding actions.
    """
    _check_places(schedule)
    _check_each_once(schedule)
    has_communication = schedule.has_communication
    stuck = _stuck_ranks(schedule, has_communication)
    if stuck:
        _check_order_on_ranks(schedule, has_communication)
    if has_communication:
        _check_channels(schedule)
    if stuck:
        raise _deadlock(schedule, stuck, has_communication)


def _fail(schedule: Schedule, rank: int, position: int, problem: str) -> ScheduleError:
    """Return the error at a position of a rank; one past its last action marks the end."""
    actions = [*map(str, schedule.actions[rank]), "(end)"]
    first, last = max(0, position - _NUM_SHOWN), position + _NUM_SHOWN + 1
    shown = ["..."] * (first > 0) + actions[first:position]
    shown += [f"-> {actions[position]}", *actions[position + 1 : last]]
    shown += ["..."] * (last < len(actions))
    return ScheduleError(
        f"schedule {schedule.name!r}, rank {rank}, position {position}: {problem} (row {rank + 1} "
        f"as CSV)\n  rank {rank}: {' '.join(shown)}"
    )


def _placed(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            yield rank, position, action


def _check_places(schedule: Schedule) -> None:
    if len(schedule.actions) != schedule.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {len(schedule.actions)} rows of actions for "
            f"{schedule.num_ranks} ranks: give one row per rank"
        )
    for rank, position, action in _placed(schedule):
        if not 0 <= action.stage < schedule.num_stages:
            problem = f"{action} is on a stage outside 0..{schedule.num_stages - 1}"
        elif not 0 <= action.microbatch < schedule.num_microbatches:
            problem = f"{action} is on a microbatch outside 0..{schedule.num_microbatches - 1}"
        elif schedule.rank_of(action.stage) != rank:
            problem = f"{action} belongs on rank {schedule.rank_of(action.stage)}"
        else:
            continue
        raise _fail(schedule, rank, position, problem)


def _check_each_once(schedule: Schedule) -> None:
    # For each stage and microbatch the place of each operation.
    work: defaultdict[tuple[int, int], dict[Op, tuple[int, int]]] = defaultdict(dict)
    for rank, position, action in _placed(schedule):
        places = work[action.stage, action.microbatch]
        if action.op in places:
            problem = f"{action} runs twice, first at position {places[action.op][1]}"
            raise _fail(schedule, rank, position, problem)
        places[action.op] = (rank, position)
    has_communication = schedule.has_communication
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            places = work[stage, microbatch]
            lack = _work_problem(schedule, stage, {*places}, has_communication)
            if lack is not None:
                # Mark the last action of this microbatch, or the end of the rank's actions.
                rank = schedule.rank_of(stage)
                end = (rank, len(schedule.actions[rank]))
                rank, position = max(places.values(), default=end)
                which = f"stage {stage}, microbatch {microbatch}"
                raise _fail(schedule, rank, position, f"{which}: {lack}")


def _work_problem(
    schedule: Schedule, stage: int, present: set[Op], has_communication: bool
) -> str | None:
    if Op.F not in present:
        return "there is no F"
    backward = present & _BACKWARDS
    if backward not in ({Op.B}, {Op.I, Op.W}):
        ops = " and ".join(sorted(op.value for op in backward)) or "none"
        return f"its backward must be one B, or one I and one W, but is {ops}"
    if not has_communication:
        return None
    expected = set()
    if schedule.has_messages(stage, stage - 1):
        expected |= {Op.RECV_F, Op.SEND_B}
    if schedule.has_messages(stage, stage + 1):
        expected |= {Op.SEND_F, Op.RECV_B}
    actual = {op for op in present if not op.is_compute}
    if missing := expected - actual:
        return f"missing {', '.join(sorted(op.value for op in missing))}"
    if extra := actual - expected:
        return f"{', '.join(sorted(op.value for op in extra))} has no stage at its other end"
    return None


def _check_order_on_ranks(schedule: Schedule, has_communication: bool) -> None:
    needs = needs_of(schedule, has_communication=has_communication)
    for rank, actions in enumerate(schedule.actions):
        made_at: dict[Event, int] = {event_of(action): at for at, action in enumerate(actions)}
        for position, action in enumerate(actions):
            for event in needs(action):
                at = made_at.get(event, -1)
                if at > position:
                    problem = f"{action} runs before {actions[at]}, which it needs"
                    raise _fail(schedule, rank, position, problem)


def _check_channels(schedule: Schedule) -> None:
    """Check that messages of one direction between two ranks are received in sending order."""
    sent: dict[tuple[int, int, Op], deque[Action]] = {}
    for rank, action in schedule:
        if action.op in _RECEIVED_BY:
            receive, step = _RECEIVED_BY[action.op]
            message = Action(receive, action.stage + step, action.microbatch)
            channel = (rank, schedule.rank_of(message.stage), receive)
            sent.setdefault(channel, deque()).append(message)
    for rank, position, action in _placed(schedule):
        if action.op in (Op.RECV_F, Op.RECV_B):
            sender = schedule.rank_of(action.stage + (-1 if action.op is Op.RECV_F else 1))
            expected = sent[sender, rank, action.op].popleft()
            if action != expected:
                problem = (
                    f"{action} is received out of order: the next message from rank {sender} "
                    f"is for {expected}"
                )
                raise _fail(schedule, rank, position, problem)


def _stuck_ranks(schedule: Schedule, has_communication: bool) -> dict[int, int]:
    """Return the ranks that cannot run all of their actions, with the first one's position."""
    needs = needs_of(schedule, has_communication=has_communication)
    positions = [0] * schedule.num_ranks
    for rank, position, _ in run_in_order(schedule.actions, needs):
        positions[rank] = position + 1
    return {rank: at for rank, at in enumerate(positions) if at < len(schedule.actions[rank])}


def _deadlock(schedule: Schedule, stuck: dict[int, int], has_communication: bool) -> ScheduleError:
    needs = needs_of(schedule, has_communication=has_communication)
    done: set[Event] = set()
    for rank, actions in enumerate(schedule.actions):
        done.update(map(event_of, actions[: stuck.get(rank)]))
    waits = []
    for rank, at in sorted(stuck.items()):
        action = schedule.actions[rank][at]
        what, stage, microbatch = next(event for event in needs(action) if event not in done)
        waits.append(
            f"rank {rank} at {action} (position {at}) waits for the {what} of stage {stage}, "
            f"microbatch {microbatch}"
        )
    rank = min(stuck, key=lambda rank: stuck[rank])
    return _fail(schedule, rank, stuck[rank], "deadlock: " + "; ".join(waits))
