"""Format the plan of each rank as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from chunkgraph.cli.plan_banks import BANK_HEADINGS, bank_rows
from chunkgraph.cli.plan_memory import MEMORY_HEADINGS, kept_line, memory_cells
from chunkgraph.slots import BankEstimate, MemoryEstimate, SlotPlan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["RankRow", "as_json", "print_tables", "table"]

_MAX_RANKS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """The plan of one rank."""

    plan: SlotPlan
    bubble_ratio: float
    memory: MemoryEstimate | None
    step_ms: float | None = None
    banks: tuple[BankEstimate, ...] = ()


def as_json(row: RankRow) -> dict[str, object]:
    """Return the plan of one rank for ``--json``."""
    plan = row.plan
    return {
        "rank": plan.rank,
        "slots_per_chunk": plan.slots_per_chunk,
        "num_graphs": plan.num_graphs,
        "peak_in_flight": plan.peak_in_flight,
        "bubble_ratio": round(row.bubble_ratio, 6),
        **({} if row.step_ms is None else {"step_ms": row.step_ms}),
        **({} if row.memory is None else asdict(row.memory)),
        **({"banks": [asdict(bank) for bank in row.banks]} if row.banks else {}),
    }


def print_tables(console: Console, rows: Sequence[RankRow]) -> None:
    """Print slots and, with a model, memory, also by bank; of the first ranks if there are many."""
    num_left_out = len(rows) - _MAX_RANKS
    rows = rows[:_MAX_RANKS]
    planned = [
        [
            str(row.plan.rank),
            " ".join(map(str, row.plan.slots_per_chunk)),
            str(row.plan.num_graphs),
            str(row.plan.peak_in_flight),
            f"{row.bubble_ratio:.1%}",
        ]
        for row in rows
    ]
    headings = ("Rank", "Slots per chunk", "Graphs", "Peak in flight", "Bubble ratio")
    console.print(table(headings, planned))
    estimates = [(row.plan, row.memory) for row in rows if row.memory is not None]
    if estimates:
        console.print("Memory, estimated from the model's sizes", style="bold")
        console.print(table(MEMORY_HEADINGS, [memory_cells(*one) for one in estimates]))
        console.print(kept_line(estimates))
    banks = [cells for row in rows for cells in bank_rows(row.plan.rank, row.banks)]
    if banks:
        console.print("Banks, largest first; their variants of a slot share memory", style="bold")
        console.print(table(BANK_HEADINGS, banks))
    if num_left_out > 0:
        console.print(f"... {num_left_out} more ranks: --json prints all, --rank R one of them")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table with right-aligned columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
