"""A schedule as a value: the actions of every rank, in order."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from chunkgraph.errors import ScheduleError

from .action import Action, Op
from .placement import Placement, chunk_of, rank_of, stage_of

__all__ = ["Schedule"]

_OVERLAP = re.compile(r"\s*\((.*)\)OVERLAP_F_B\s*")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank of a pipeline does in one step.

    It is plain data: building one checks nothing, ``validate`` does. Iterating gives
    ``(rank, action)`` pairs, rank by rank.

    Attributes:
        name: Schedule family, such as ``interleaved``.
        num_ranks: Pipeline-parallel size.
        num_chunks: Model chunks on each rank.
        num_microbatches: Microbatches in the step.
        group_size: Microbatch group size, None where chunks do not interleave.
        actions: One tuple of actions per rank, in the order the rank runs them.
        placement: Where the stages are.
    """

    name: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    group_size: int | None
    actions: tuple[tuple[Action, ...], ...]
    placement: Placement = Placement.LOOP

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        for rank, actions in enumerate(self.actions):
            for action in actions:
                yield rank, action

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.num_chunks

    @property
    def has_communication(self) -> bool:
        """Whether sends and receives are spelled out."""
        return any(action.op.is_communication for _, action in self)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from input gradients."""
        return any(action.op is Op.W for _, action in self)

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return rank_of(stage, self.num_ranks, self.placement)

    def chunk_of(self, stage: int) -> int:
        """The index of ``stage`` among the chunks of its rank."""
        return chunk_of(stage, self.num_ranks)

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage that ``rank`` holds as its chunk number ``chunk``."""
        return stage_of(rank, chunk, self.num_ranks, self.placement)

    def has_messages(self, stage: int, other: int) -> bool:
        """Whether two neighbouring stages are both there, and on different ranks."""
        are_there = min(stage, other) >= 0 and max(stage, other) < self.num_stages
        return are_there and self.rank_of(stage) != self.rank_of(other)

    def compute_actions(self, rank: int) -> tuple[Action, ...]:
        """The actions of one rank without sends and receives."""
        return tuple(action for action in self.actions[rank] if action.op.is_compute)

    def with_communication(self) -> Schedule:
        """The same schedule with sends and receives spelled out.

        A receive stands right before the action that needs it, a send right after the action that
        made its tensor. Sends do not wait for their receives. Existing sends and receives are
        replaced; stages that share a rank exchange tensors without any.
        """
        return replace(
            self,
            actions=tuple(
                tuple(
                    with_neighbours
                    for action in self.compute_actions(rank)
                    for with_neighbours in self._surrounded(action)
                )
                for rank in range(self.num_ranks)
            ),
        )

    def _surrounded(self, action: Action) -> tuple[Action, ...]:
        stage, microbatch = action.stage, action.microbatch
        if action.op is Op.W:
            return (action,)
        has_previous = self.has_messages(stage, stage - 1)
        has_next = self.has_messages(stage, stage + 1)
        if action.op is Op.F:
            before, after, receives, sends = Op.RECV_F, Op.SEND_F, has_previous, has_next
        else:
            before, after, receives, sends = Op.RECV_B, Op.SEND_B, has_next, has_previous
        return (
            *((Action(before, stage, microbatch),) if receives else ()),
            action,
            *((Action(after, stage, microbatch),) if sends else ()),
        )

    def to_csv(self) -> str:
        """One row per rank, one action per cell: the layout torch's pipelining reads."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [str(action) for action in actions] for actions in self.actions
        )
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str, *, name: str = "csv", group_size: int | None = None) -> Schedule:
        """Read what ``to_csv`` or torch wrote, or a person.

        Sizes and placement are taken from the rows: row r holds the actions of rank r. Empty cells
        (how torch writes a bubble) are skipped; ``(2F3;5B0)OVERLAP_F_B`` is the actions in the
        brackets. The rules of a schedule are checked by ``validate``, not here.

        Args:
            text: CSV text.
            name: Name of the schedule, which the text does not hold.
            group_size: Microbatch group size, which the text does not hold.

        Raises:
            ScheduleError: A cell is not an action, or a row has none; names the row and the cell.
        """
        rows: list[tuple[Action, ...]] = []
        for row_number, cells in enumerate(csv.reader(io.StringIO(text.rstrip())), start=1):
            row: list[Action] = []
            for cell_number, cell in enumerate(cells, start=1):
                pair = _OVERLAP.fullmatch(cell)
                try:
                    parts = pair[1].split(";") if pair else [cell] if cell.strip() else []
                    row += [Action.parse(part) for part in parts]
                except ScheduleError as error:
                    raise ScheduleError(f"row {row_number}, cell {cell_number}: {error}") from None
            if not row:
                raise ScheduleError(f"row {row_number} is empty: expected the actions of a rank")
            rows.append(tuple(row))
        if not rows:
            raise ScheduleError("the schedule is empty: expected one row of actions per rank")
        everything = [action for row in rows for action in row]
        num_stages = 1 + max(action.stage for action in everything)
        return cls(
            name=name,
            num_ranks=len(rows),
            num_chunks=-(-num_stages // len(rows)),
            num_microbatches=1 + max(action.microbatch for action in everything),
            group_size=group_size,
            actions=tuple(rows),
            placement=_placement_of(rows),
        )


def _placement_of(rows: Sequence[Sequence[Action]]) -> Placement:
    """The placement that fits the rows; LOOP if none does, which ``validate`` then refuses."""
    places = {(rank, action.stage) for rank, row in enumerate(rows) for action in row}
    for placement in Placement:
        if all(rank_of(stage, len(rows), placement) == rank for rank, stage in places):
            return placement
    return Placement.LOOP
