"""``chunkgraph plan``: plan slots, graphs and memory of a schedule, and draw it; needs no torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkgraph._outputs import check_output, is_stdout, output_file, stream_next_to, write_output
from chunkgraph._text import counted, shorten
from chunkgraph.cli.arguments import add_config, add_json, prints_json
from chunkgraph.cli.plan_export import MAX_DRAWN, MAX_EXPORTED, Grid, as_html, as_trace, too_large
from chunkgraph.cli.plan_memory import add_gpu_memory
from chunkgraph.cli.plan_pages import add_slots, print_fewer_slots, print_pages
from chunkgraph.cli.plan_request import EXAMPLE, Request, request_of
from chunkgraph.cli.plan_tables import (
    as_json,
    compare,
    exit_code,
    print_comparison,
    print_rows,
    rows_of,
)
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import draw_svg, list_schedules

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DESCRIPTION = f"""\
Plan the slots of every rank and draw the schedule. Slots and graphs hold for
every legal number of microbatches; bubble ratio and picture are of one step.
Times count in forwards of all layers of a rank; a backward takes two.

  {EXAMPLE}
  chunkgraph plan configs/cpu/gpt_pp2_vpp2_cpu.yaml model.num_layers=16
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="slots, graphs, memory and the picture of a schedule; needs no torch",
        usage="%(prog)s [CONFIG [section.key=value ...]] [options]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config(parser)
    parser.add_argument("--pp", type=int, metavar="P", help="pipeline-parallel size")
    parser.add_argument("--vpp", type=int, metavar="V", help="chunks on each rank")
    parser.add_argument(
        "--group-size", type=int, metavar="G", help="microbatch group size (default P)"
    )
    parser.add_argument(
        "--num-microbatches",
        type=int,
        metavar="M",
        help="of the drawn step (default 2 G; with CONFIG its largest)",
    )
    parser.add_argument(
        "--schedule",
        default="auto",
        metavar="NAME|FILE.csv",
        help=f"{', '.join(list_schedules())}, or a CSV file of actions; default auto: Megatron's "
        "own, 1f1b or interleaved",
    )
    parser.add_argument(
        "--compare", action="store_true", help="compare all schedules, and recommend one"
    )
    add_gpu_memory(parser)
    add_slots(parser)
    add_json(parser)
    for option, what in {
        "--svg": "draw the step",
        "--html": "draw it on a page that zooms; with --compare, all schedules",
        "--trace": "write it as a trace for Perfetto",
    }.items():
        parser.add_argument(option, type=output_file, metavar="FILE", help=what)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code.

    Raises:
        ConfigError: The arguments, the config or the sizes are wrong, or the picture cannot be
            written.
        OutputError: Writing the picture failed.
    """
    request = request_of(args)
    if args.compare:
        return _compare(args, request)
    shape = request.shape()
    pictures = {"--svg": args.svg, "--html": args.html, "--trace": args.trace}
    pictures = {option: path for option, path in pictures.items() if path is not None}
    _check_outputs({**pictures, "--json": args.json})
    for option in pictures:
        problem = too_large(shape, MAX_DRAWN if option == "--svg" else MAX_EXPORTED)
        if problem is not None:
            raise ConfigError(f"plan: {option}: {problem}")
    no_grid = too_large(shape)
    is_printed = not prints_json(args)
    limits = {"--slots": args.slots, "--max-slot-memory": args.max_slot_memory}
    if not is_printed:
        _refuse(limits, "with --json on standard output")
    if set(limits.values()) == {None} and isinstance(args.page_time, list):  # not the default
        _refuse({"--page-time": args.page_time}, "without --slots or --max-slot-memory")
    is_simulated = pictures or (is_printed and no_grid is None)
    grid = Grid.of(request.build()) if is_simulated else None
    rows = rows_of(request, grid)
    for option, path in pictures.items():
        assert grid is not None
        if option == "--svg":
            content = draw_svg(grid.simulation, slots=grid.slots)
        elif option == "--html":
            content = as_html([(grid, rows)], title=f"{request.schedule}: {_title(request)}")
        else:
            content = as_trace(grid)
        write_output(f"plan: {option}", path, content)
    if args.json is not None:
        content = json.dumps([as_json(row) for row in rows], indent=2)
        write_output("plan: --json", args.json, f"{content}\n")
    if is_printed:
        # Only printed tables need rich.
        from rich.console import Console

        console = Console(file=stream_next_to(*pictures.values()), highlight=False, markup=False)
        print_rows(console, request, rows)
        print_pages(console, args, request, rows)
        step = counted(request.num_microbatches, "microbatch")
        console.print(f"One step of {step}", style="bold")
        if grid is None or no_grid is not None:
            console.print(f"No grid: {no_grid}.", soft_wrap=True)
        else:
            grid.print(console)
        for path in pictures.values():
            console.print(f"Drawn in {shorten(str(path))}", soft_wrap=True)
    return exit_code(request, rows)


def _compare(args: argparse.Namespace, request: Request) -> int:
    from rich.console import Console

    wrong = {"--svg": args.svg, "--trace": args.trace, "--json": args.json}
    wrong |= {"--slots": args.slots, "--max-slot-memory": args.max_slot_memory}
    if args.schedule != "auto" and request.file is None:
        wrong["--schedule"] = args.schedule
    _refuse(wrong, "with --compare")
    _check_outputs({"--html": args.html})
    compared, refused = compare(request)
    if args.html is not None:
        steps = []
        for one in compared:
            if (problem := too_large(one.request.shape())) is not None:
                raise ConfigError(f"plan: --compare with --html: {problem}")
            grid = Grid.of(one.request.build())
            steps.append((grid, rows_of(one.request, grid)))
        write_output("plan: --html", args.html, as_html(steps, title=_title(request)))
    console = Console(file=stream_next_to(args.html), highlight=False, markup=False)
    console.print(f"Schedules for {_title(request)}", style="bold", soft_wrap=True)
    best = print_comparison(console, compared, refused)
    print_fewer_slots(console, args, best, rows_of(best))
    return 0


def _refuse(options: dict[str, Any], why: str) -> None:
    for option in (option for option, value in options.items() if value is not None):
        raise ConfigError(f"plan: {option} has no effect {why}; leave it out")


def _title(request: Request) -> str:
    step = counted(request.num_microbatches, "microbatch")
    return f"{counted(request.num_ranks, 'rank')}, {step}"


def _check_outputs(paths: dict[str, Path | None]) -> None:
    """Check that all files can be written, and at most one to standard output."""
    outputs = {option: path for option, path in paths.items() if path is not None}
    for option, path in outputs.items():
        check_output(f"plan: {option}", path)
    printed = [option for option, path in outputs.items() if is_stdout(path)]
    if len(printed) > 1:
        names = " and ".join(printed)
        raise ConfigError(f"plan: {names} cannot both be written to standard output")
