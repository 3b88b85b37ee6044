"""Order sends and receives so that ranks cannot deadlock.

Transports run the transfers between two ranks one after another, in the order in which each rank
posts them. So both must post sends and receives in the same order. This is the order of a
simulation: a transfer is posted when its tensor exists.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from .action import Action, Op
from .schedule import Schedule
from .simulate import CostModel, Span, simulate

__all__ = ["with_transfers"]


def with_transfers(schedule: Schedule, costs: CostModel | None = None) -> Schedule:
    """Return the schedule with sends and receives in one order for all ranks.

    A send follows the action that produces its tensor. A receive is posted early: before the
    actions that its rank runs while the tensor is computed. Stages of one rank exchange tensors
    without a transfer. Existing sends and receives are replaced.

    Args:
        schedule: a valid schedule.
        costs: duration of each action; decides which of two independent transfers comes first.

    Raises:
        ScheduleError: the schedule is not valid.
    """
    spans = simulate(schedule, costs).spans
    rows = [_Row(row) for row in spans]
    transfers = [
        transfer
        for rank, row in enumerate(spans)
        for span in row
        if (transfer := _transfer_after(schedule, rank, span)) is not None
    ]
    for transfer in sorted(transfers):
        rows[transfer.sender].run_through(transfer.time_ms)
        rows[transfer.sender].actions.append(transfer.send)
        rows[transfer.receiver].run_until(transfer.time_ms)
        rows[transfer.receiver].actions.append(transfer.receive)
    for row in rows:
        row.run_until(math.inf)
    return replace(schedule, actions=tuple(tuple(row.actions) for row in rows))


class _Transfer(NamedTuple):
    time_ms: float
    stage: int
    is_backward: bool
    microbatch: int
    sender: int
    receiver: int

    @property
    def send(self) -> Action:
        return Action(Op.SEND_B if self.is_backward else Op.SEND_F, self.stage, self.microbatch)

    @property
    def receive(self) -> Action:
        op, step = (Op.RECV_B, -1) if self.is_backward else (Op.RECV_F, 1)
        return Action(op, self.stage + step, self.microbatch)


class _Row:
    """The actions of one rank, in the process of being placed."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self.actions: list[Action] = []
        self._spans = spans
        self._position = 0

    def run_through(self, time_ms: float) -> None:
        """Place the actions that end at or before a time."""
        self.run_until(math.nextafter(time_ms, math.inf))

    def run_until(self, time_ms: float) -> None:
        """Place the actions that end before a time."""
        while self._position < len(self._spans) and self._spans[self._position].end_ms < time_ms:
            self.actions.append(self._spans[self._position].action)
            self._position += 1


def _transfer_after(schedule: Schedule, rank: int, span: Span) -> _Transfer | None:
    """Return the transfer of an action's tensor; None if no other rank needs it."""
    action = span.action
    if action.op is Op.W:
        return None
    is_backward = action.op is not Op.F
    stage = action.stage - 1 if is_backward else action.stage + 1
    if not 0 <= stage < schedule.num_stages or schedule.rank_of(stage) == rank:
        return None
    return _Transfer(
        span.end_ms, action.stage, is_backward, action.microbatch, rank, schedule.rank_of(stage)
    )
