"""Plan fewer slots than microbatches in flight: what moves to the host, and what it costs."""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import inf
from operator import mul
from typing import TYPE_CHECKING

from chunkgraph._text import format_bytes
from chunkgraph.cli.plan_memory import byte_count
from chunkgraph.cli.plan_request import Request
from chunkgraph.cli.plan_tables import RankRow, table
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import CostModel, simulate
from chunkgraph.slots import PageClock, PagePlan, plan_pages, split_actions

if TYPE_CHECKING:
    from rich.console import Console


_TOLERANCE = 1.05


def add_slots(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit slots."""
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument(
        "--slots",
        type=int,
        metavar="K",
        help="at most K slots of a chunk: what forwards save moves to the host and back",
    )
    limit.add_argument(
        "--max-slot-memory",
        type=byte_count,
        metavar="SIZE",
        help="instead, the memory of all slots of a rank, such as 20GiB; needs a CONFIG",
    )
    default = CostModel().page_out_ms, CostModel().page_in_ms
    parser.add_argument(
        "--page-time",
        type=float,
        nargs=2,
        default=default,
        metavar=("OUT", "IN"),
        help="time of a page to the host and back, in forwards of a chunk (default {} {})".format(
            *default
        ),
    )


def _counts(args: argparse.Namespace, row: RankRow) -> tuple[int, ...]:
    """Return the slots of each chunk of a rank within the limit.

    Raises:
        ConfigError: The rank cannot keep the limit.
    """
    full = row.plan.slots_per_chunk
    sizes: Sequence[int] = [0] * len(full)
    if args.max_slot_memory is not None:
        if row.memory is None:
            raise ConfigError("plan: --max-slot-memory needs a CONFIG with a model that it knows")
        sizes = row.memory.slot_bytes_per_chunk
    for cap in range(max(full) if args.slots is None else args.slots, 0, -1):
        counts = tuple(min(count, cap) for count in full)
        if sum(map(mul, counts, sizes)) <= (args.max_slot_memory or 0):
            return counts
    raise ConfigError(
        f"plan: rank {row.plan.rank} has not one slot of each chunk; raise --slots or "
        "--max-slot-memory"
    )


def _simulated(
    request: Request, args: argparse.Namespace, counts: Sequence[tuple[int, ...]]
) -> tuple[list[PagePlan], float]:
    """Return the plan of each rank, and the ratio of the step to that with all slots.

    Raises:
        ConfigError: A chunk has too few slots.
    """
    schedule, (out, back) = split_actions(request.build()), args.page_time
    costs = CostModel(page_out_ms=out, page_in_ms=back)
    plans = [plan_pages(schedule, rank, of_rank, costs) for rank, of_rank in enumerate(counts)]
    clocks = {rank: PageClock(plan, costs) for rank, plan in enumerate(plans)}
    paged, whole = simulate(schedule, costs, clocks), simulate(schedule, costs)
    return plans, paged.makespan_ms / whole.makespan_ms


def print_pages(
    console: Console, args: argparse.Namespace, request: Request, rows: Sequence[RankRow]
) -> None:
    """Print slots, pages and the simulated step, if slots are limited.

    Raises:
        ConfigError: A chunk has too few slots.
    """
    if args.slots is None and args.max_slot_memory is None:
        return
    counts = [_counts(args, row) for row in rows]
    plans, ratio = _simulated(request, args, counts)
    cells, of_host = [], 0
    for plan, count, row in zip(plans, counts, rows, strict=True):
        line = [str(row.plan.rank), " ".join(map(str, count)), str(len(plan.pages))]
        if row.memory is not None:
            sizes = row.memory.slot_bytes_per_chunk
            moved = 2 * sum(sizes[page.key[0]] for page in plan.pages)
            slots, pinned = (sum(map(mul, n, sizes)) for n in (count, plan.num_buffers))
            line += map(format_bytes, (slots, moved, pinned))
            of_host += pinned
        cells.append(line)
    headings = ("Rank", "Slots per chunk", "Pages", "Slots", "Moved", "Pinned memory")
    console.print("Pages: activations on the host, in one step", style="bold")
    console.print(table(headings[: len(cells[0])], cells))
    if of_host:
        console.print(f"Pinned memory of all ranks: {format_bytes(of_host)}.")
    console.print(
        f"Simulated step: {ratio:.3f} of that with all slots, if a page takes "
        "{:g} forwards to the host and {:g} back.".format(*args.page_time),
        soft_wrap=True,
    )


def print_fewer_slots(
    console: Console, args: argparse.Namespace, request: Request, rows: Sequence[RankRow]
) -> None:
    """Print how few slots lengthen a step by at most a twentieth, unless that needs all."""
    if request.file is None:  # more microbatches change the ratio little
        count = min(request.num_microbatches, 4 * (request.group_size or request.num_ranks))
        request = replace(request, num_microbatches=count)
    full = [row.plan.slots_per_chunk for row in rows]

    @cache
    def ratio_of(most: int) -> float:
        with suppress(ConfigError):  # too few
            counts = [tuple(min(count, most) for count in own) for own in full]
            return _simulated(request, args, counts)[1]
        return inf

    fewer = range(1, max(map(max, full)))
    index = bisect_left(fewer, True, key=lambda most: ratio_of(most) <= _TOLERANCE)
    for most in fewer[index : index + 1]:
        how = "(--slots, --page-time {:g} {:g})".format(*args.page_time)
        console.print(f"{most} slots of a chunk take {ratio_of(most):.3f} of its step {how}.")
