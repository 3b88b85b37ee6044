"""ZB-V and DualPipeV: two chunks per rank placed as a V, so rank 0 holds the first and last stage.

ZB-V splits every backward: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6. The first
backwards finish early, and if F, I and W take the same time, ranks idle only until the first
microbatch reaches them. Every rank holds at most ``2 * num_ranks`` microbatches of its half-size
chunks: as much memory as 1F1B on rank 0.

DualPipeV runs forwards in pairs with backwards: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report",
section 3.2.1 (DualPipe), in the V-shaped form of their repository, which holds the parameters once.
DualPipe overlaps a forward with the backward after it, each hiding the other's communication; here
they run one after the other. Most backwards are whole; weight gradients are split off only where a
rank would idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from chunkgraph.schedules.action import Action, Op
from chunkgraph.schedules.shape import InFlight, PipelineShape, Placement, stage_of


def zb_v_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order.

    A step with too few microbatches to fill the pipeline is a larger step without the others.
    """
    p, r = shape.num_ranks, rank
    n = max(shape.num_microbatches, 2 * p - 1)
    warmup = ["F0"] * (2 * (p - r) - 1) + ["F1", "F0"] * r + ["F1", "I1", "W1"] * (p - r)
    steady = ["F0", "I0", "W0", "F1", "I1", "W1"] * (n - 2 * p + r + 1)
    drain = ["I0", "W0", "F1", "I1", "W1"] * (p - r - 1)
    cooldown = ["I0", "I1"] * r + ["I0", "W0"] * (p - r) + ["W1"] * r + ["W0"] * r
    actions = _actions_of_steps(warmup + steady + drain + cooldown, rank, p)
    return tuple(action for action in actions if action.microbatch < shape.num_microbatches)


def zb_v_in_flight(shape: PipelineShape, rank: int) -> InFlight:
    """Return the most microbatches in flight on a rank, in a step of this many or fewer."""
    p, n = shape.num_ranks, shape.num_microbatches
    per_chunk = (min(2 * p - rank, n), min(rank + 1, n))
    return InFlight(per_chunk, min(sum(per_chunk), 2 * p))


def zb_v_idle_forwards(shape: PipelineShape) -> int:
    """Return every rank's idle time in forwards: one per other rank, more in small steps."""
    num_others = shape.num_ranks - 1
    return max(num_others, 4 * num_others - 2 * (shape.num_microbatches - 1))


def dualpipe_v_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order; needs two microbatches per rank or more."""
    p, r, n = shape.num_ranks, rank, shape.num_microbatches
    warmup = ["F0"] * 2 * (p - r - 1) + ["F0", "F1"] * (r + 1) + ["I1", "W", "F1"] * (p - r - 1)
    steady = ["F0", "B1", "F1", "B0"] * (n - 2 * p + r + 1)
    drain = ["B1", "F1", "B0"] * (p - r - 1)
    # Both chunks in turn: r + 1 whole backwards, then r + 1 without weight gradients.
    ops = ["B"] * (r + 1) + ["I"] * (r + 1)
    turns = [f"{op}{chunk}" for op, chunk in zip(ops, [1, 0] * (r + 1), strict=True)]
    cooldown = turns + ["W", "I0"] * (p - r - 1) + ["W"] * (r + 1)
    return tuple(_actions_of_steps(warmup + steady + drain + cooldown, rank, p))


def dualpipe_v_in_flight(shape: PipelineShape, rank: int) -> InFlight:
    """Return the most microbatches in flight on a rank, the same in every legal step."""
    per_chunk = (2 * shape.num_ranks - rank, rank + 1)
    return InFlight(per_chunk, sum(per_chunk))


def dualpipe_v_idle_forwards(shape: PipelineShape) -> int:
    """Return every rank's idle time in forwards: one forward of each other rank."""
    return shape.num_ranks - 1


def _actions_of_steps(steps: Iterable[str], rank: int, num_ranks: int) -> list[Action]:
    """Return an action for each step, with its stage and microbatch.

    Each chunk forwards its microbatches in order, and its backwards follow in the same order.

    Args:
        steps: operation and chunk, such as ``F0``, ``B1``, ``I1`` or ``W1``. A W belongs to the
            oldest I of its chunk that has no W yet; without a chunk, to the oldest of the rank.
        rank: rank of the chunks.
        num_ranks: pipeline-parallel size.
    """
    stages = [stage_of(rank, chunk, num_ranks, Placement.V) for chunk in (0, 1)]
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
