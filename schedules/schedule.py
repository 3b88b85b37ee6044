"""A schedule as a value: the actions of every rank, in order."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass

from chunkgraph.errors import ScheduleError

from .action import Action, Op
from .placement import chunk_of, rank_of, stage_of

__all__ = ["Schedule"]


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
    """

    name: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    group_size: int | None
    actions: tuple[tuple[Action, ...], ...]

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

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return rank_of(stage, self.num_ranks)

    def chunk_of(self, stage: int) -> int:
        """The index of ``stage`` among the chunks of its rank."""
        return chunk_of(stage, self.num_ranks)

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage that ``rank`` holds as its chunk number ``chunk``."""
        return stage_of(rank, chunk, self.num_ranks)

    def compute_actions(self, rank: int) -> tuple[Action, ...]:
        """The actions of one rank without sends and receives."""
        return tuple(action for action in self.actions[rank] if action.op.is_compute)

    def with_communication(self) -> Schedule:
        """The same schedule with sends and receives spelled out.

        A receive stands right before the action that needs it, a send right after the action that
        made its tensor. Sends do not wait for their receives. Existing sends and receives are
        replaced; stages that share a rank exchange tensors without any.
        """
        return Schedule(
            name=self.name,
            num_ranks=self.num_ranks,
            num_chunks=self.num_chunks,
            num_microbatches=self.num_microbatches,
            group_size=self.group_size,
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
        if self.num_ranks == 1 or action.op is Op.W:
            return (action,)
        has_previous, has_next = stage > 0, stage < self.num_stages - 1
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
        """Read what ``to_csv`` wrote.

        Sizes are taken from the rows: the number of rows is the number of ranks. Empty cells (how
        torch writes a bubble) are skipped. The result is not validated.

        Args:
            text: CSV text.
            name: Name of the schedule, which the text does not hold.
            group_size: Microbatch group size, which the text does not hold.

        Raises:
            ScheduleError: A cell is not an action, or there is none; names row and cell.
        """
        rows: list[tuple[Action, ...]] = []
        for row_number, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
            row: list[Action] = []
            for cell_number, cell in enumerate(cells, start=1):
                if not cell.strip():
                    continue
                try:
                    row.append(Action.parse(cell))
                except ScheduleError as error:
                    raise ScheduleError(f"row {row_number}, cell {cell_number}: {error}") from None
            rows.append(tuple(row))
        everything = [action for row in rows for action in row]
        if not everything:
            raise ScheduleError("the schedule is empty: expected one row of actions per rank")
        num_stages = 1 + max(action.stage for action in everything)
        return cls(
            name=name,
            num_ranks=len(rows),
            num_chunks=-(-num_stages // len(rows)),
            num_microbatches=1 + max(action.microbatch for action in everything),
            group_size=group_size,
            actions=tuple(rows),
        )
