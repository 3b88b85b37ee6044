"""Expand a row of steps, such as ``F0 F1 I1 W``, into a rank's actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .action import Action, Op

__all__ = ["actions_of_steps"]


def actions_of_steps(steps: Iterable[str], stages: Sequence[int]) -> list[Action]:
    """Return an action for each step, with its stage and microbatch.

    Each chunk forwards its microbatches in order, and its backwards follow in the same order.

    Args:
        steps: operation and chunk, such as ``F0``, ``B1``, ``I1`` or ``W1``. A W belongs to the
            oldest I of its chunk that has no W yet; without a chunk, to the oldest of the rank.
        stages: stage of each chunk of the rank.
    """
    count: Counter[tuple[bool, int]] = Counter()
    pending: list[Action] = []  # I without W
    actions = []
    for step in steps:
        op, chunk = Op(step[0]), step[1:]
        if op is Op.W:
            oldest = next(i for i in pending if not chunk or i.stage == stages[int(chunk)])
            pending.remove(oldest)
            action = Action(op, oldest.stage, oldest.microbatch)
        else:
            stage = stages[int(chunk)]
            action = Action(op, stage, count[op is Op.F, stage])
            count[op is Op.F, stage] += 1
            if op is Op.I:
                pending.append(action)
        actions.append(action)
    return actions
