"""A rank's actions out of a row of steps, such as ``F0 F1 I1 W``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .action import Action, Op

__all__ = ["numbered"]


def numbered(steps: Iterable[str], stages: Sequence[int]) -> list[Action]:
    """Give every step its stage and its microbatch.

    Each chunk forwards its microbatches in order, and its backwards follow in the same order.

    Args:
        steps: Operation and chunk, such as ``F0``, ``B1``, ``I1`` or ``W1``. A W belongs to the
            oldest I of its chunk that has none yet; without a chunk, to the oldest of the rank.
        stages: Stage of each chunk of the rank.
    """
    count: Counter[tuple[bool, int]] = Counter()
    due: list[Action] = []
    actions = []
    for step in steps:
        op, chunk = Op(step[0]), step[1:]
        if op is Op.W:
            oldest = next(i for i in due if not chunk or i.stage == stages[int(chunk)])
            due.remove(oldest)
            action = Action(op, oldest.stage, oldest.microbatch)
        else:
            stage = stages[int(chunk)]
            action = Action(op, stage, count[op is Op.F, stage])
            count[op is Op.F, stage] += 1
            if op is Op.I:
                due.append(action)
        actions.append(action)
    return actions
