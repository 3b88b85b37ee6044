"""Draw the part of a schedule around one action, for error messages."""

from __future__ import annotations

from .schedule import Schedule

__all__ = ["neighbourhood"]

_NUM_ROWS_EITHER_SIDE = 3
_MAX_RANKS = 5


def neighbourhood(schedule: Schedule, rank: int, position: int) -> str:
    """Draw the actions near one position, a row per position and a column per rank.

    Args:
        schedule: any schedule, valid or not.
        rank: rank of the action to mark.
        position: index of the action among the rank's; one past the last marks the end.

    Returns:
        Lines of text without a final newline. Rows are positions, not times: two actions of one
        row need not run at the same time.
    """
    ranks = _nearest_ranks(rank, len(schedule.actions))
    first = max(0, position - _NUM_ROWS_EITHER_SIDE)
    last = position + _NUM_ROWS_EITHER_SIDE
    columns = {shown: _column(schedule, shown, first, last) for shown in ranks}
    widths = {
        shown: max(len(f"rank {shown}"), *map(len, column)) for shown, column in columns.items()
    }
    header = "  ".join(f"   {f'rank {shown}':<{widths[shown]}}" for shown in ranks)
    lines = [f"  position  {header}".rstrip()]
    for row, number in enumerate(range(first, last + 1)):
        cells = []
        for shown in ranks:
            arrow = "-> " if (shown, number) == (rank, position) else "   "
            cells.append(f"{arrow}{columns[shown][row]:<{widths[shown]}}")
        line = f"  {number:>8}  {'  '.join(cells)}".rstrip()
        if line.strip() != str(number):
            lines.append(line)
    return "\n".join(lines)


def _nearest_ranks(rank: int, num_ranks: int) -> range:
    """Return at most five neighbouring ranks, including ``rank``."""
    start = min(max(0, rank - _MAX_RANKS // 2), max(0, num_ranks - _MAX_RANKS))
    return range(start, min(num_ranks, start + _MAX_RANKS))


def _column(schedule: Schedule, rank: int, first: int, last: int) -> list[str]:
    actions = schedule.actions[rank]
    texts = [str(action) for action in actions[first : last + 1]]
    if first <= len(actions) <= last:
        texts.append("(end)")
    return texts + [""] * (last - first + 1 - len(texts))
