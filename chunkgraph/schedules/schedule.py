"""A schedule as a value: the actions of every rank, in order."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from chunkgraph.errors import ScheduleError
from chunkgraph.schedules.action import Action, Op
from chunkgraph.schedules.shape import Placement, chunk_of, rank_of

_BYTE_ORDER_MARK = "\ufeff"  # Excel's "CSV UTF-8" begins with it
_OVERLAP = re.compile(r"\s*\((.*)\)OVERLAP_F_B\s*")


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of a pipeline in one step.

    Plain data: the constructor checks nothing, `validate` does. Iteration yields ``(rank, action)``
    pairs, rank by rank.

    Attributes:
        name: schedule family, such as ``interleaved``.
        num_ranks: pipeline-parallel size.
        num_chunks: model chunks per rank.
        num_microbatches: microbatches of the step.
        group_size: microbatch group size; None if chunks do not interleave.
        actions: one tuple of actions per rank, in the order in which the rank runs them.
        placement: the placement of the stages.
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
        """Return the number of stages of the whole pipeline."""
        return self.num_ranks * self.num_chunks

    @property
    def has_communication(self) -> bool:
        """Return whether the schedule has sends and receives."""
        return any(not action.op.is_compute for _, action in self)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from input gradients."""
        return any(action.op is Op.W for _, action in self)

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return rank_of(stage, self.num_ranks, self.placement)

    def chunk_of(self, stage: int) -> int:
        """Return the index of a stage among its rank's chunks."""
        return chunk_of(stage, self.num_ranks)

    def has_messages(self, stage: int, other: int) -> bool:
        """Return whether two neighbouring stages both exist and are on different ranks."""
        exist = min(stage, other) >= 0 and max(stage, other) < self.num_stages
        return exist and self.rank_of(stage) != self.rank_of(other)

    def compute_actions(self, rank: int) -> tuple[Action, ...]:
        """Return one rank's actions without sends and receives."""
        return tuple(action for action in self.actions[rank] if action.op.is_compute)

    def to_csv(self) -> str:
        """Return CSV in the layout of torch's pipelining: one row per rank, one action per cell."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [str(action) for action in actions] for actions in self.actions
        )
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str, *, name: str = "csv") -> Schedule:
        """Read CSV that `to_csv`, torch or a person wrote.

        Sizes and placement follow from the rows: row r holds the actions of rank r. Empty cells,
        torch's bubbles, are skipped; ``(2F3;5B0)OVERLAP_F_B`` stands for the actions in the
        brackets. Does not check the rules of a schedule; see `validate`.

        Args:
            text: the CSV text.
            name: name of the schedule, which the text does not hold.

        Raises:
            ScheduleError: a cell is not an action, or a row has none; names the row and the cell.
        """
        rows: list[tuple[Action, ...]] = []
        try:
            table = [*csv.reader(io.StringIO(text.removeprefix(_BYTE_ORDER_MARK).rstrip()))]
        except csv.Error as error:  # a cell without an end
            raise ScheduleError(f"schedule {name!r} cannot be read as CSV: {error}") from None
        for row_number, cells in enumerate(table, start=1):
            row: list[Action] = []
            for cell_number, cell in enumerate(cells, start=1):
                pair = _OVERLAP.fullmatch(cell)
                try:
                    parts = pair[1].split(";") if pair else [cell] if cell.strip() else []
                    row += [Action.parse(part) for part in parts]
                except ScheduleError as error:
                    where = f"row {row_number}, cell {cell_number}"
                    raise ScheduleError(f"schedule {name!r}, {where}: {error}") from None
            if not row:
                problem = f"row {row_number} is empty: expected the actions of a rank"
                raise ScheduleError(f"schedule {name!r}, {problem}")
            rows.append(tuple(row))
        if not rows:
            raise ScheduleError(f"schedule {name!r} is empty: expected one row of actions per rank")
        everything = [action for row in rows for action in row]
        num_stages = 1 + max(action.stage for action in everything)
        return cls(
            name=name,
            num_ranks=len(rows),
            num_chunks=-(-num_stages // len(rows)),
            num_microbatches=1 + max(action.microbatch for action in everything),
            group_size=None,
            actions=tuple(rows),
            placement=_placement_of(rows),
        )


def _placement_of(rows: Sequence[Sequence[Action]]) -> Placement:
    """Return the placement that fits the rows; LOOP if none does, which `validate` refuses."""
    places = {(rank, action.stage) for rank, row in enumerate(rows) for action in row}
    for placement in Placement:
        if all(rank_of(stage, len(rows), placement) == rank for rank, stage in places):
            return placement
    return Placement.LOOP
