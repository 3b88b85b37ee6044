"""``chunkgraph plan``: plan slots, graphs and memory of a schedule, and draw it; needs no torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chunkgraph._outputs import check_output, is_stdout, output_file, stream_next_to, write_output
from chunkgraph.cli.arguments import add_json, prints_json, whole_number
from chunkgraph.cli.plan_compare import compare, comparison_steps
from chunkgraph.cli.plan_export import (
    MAX_DRAWN,
    MAX_EXPORTED,
    Grid,
    as_html,
    as_trace,
    too_large,
)
from chunkgraph.cli.plan_memory import add_gpu_memory
from chunkgraph.cli.plan_request import EXAMPLE, Request, request_of
from chunkgraph.cli.plan_tables import RankRow, as_json, exit_code, print_rows, rows_of
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import FILE_SUFFIX, list_schedules

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser", "run"]

_DESCRIPTION = f"""\
Plan the slots of every rank and draw the schedule. Slots and graphs hold for
every legal number of microbatches; bubble ratio and picture are of one step.
Times count in forwards; a backward takes two.

  {EXAMPLE}
  chunkgraph plan configs/cpu/gpt_pp2_vpp2_cpu.yaml model.num_layers=16
"""
_MAX_PLANNED_CHUNKS = 20_000


class _Schedules(tuple[str, ...]):
    """The names of schedules, which are completed; the name of a CSV file is one of them too."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return str(name).endswith(FILE_SUFFIX) or super().__contains__(name)


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="slots, graphs, memory and the picture of a schedule; needs no torch",
        usage="%(prog)s [CONFIG [section.key=value ...]] [options]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="its changes")
    parser.add_argument("--pp", type=whole_number, metavar="P", help="pipeline-parallel size")
    parser.add_argument("--vpp", type=whole_number, metavar="V", help="chunks on each rank")
    parser.add_argument(
        "--group-size", type=whole_number, metavar="G", help="microbatch group size (default P)"
    )
    parser.add_argument(
        "--num-microbatches",
        type=whole_number,
        metavar="M",
        help="of the drawn step (default 2 G; with CONFIG its largest)",
    )
    parser.add_argument(
        "--schedule",
        choices=_Schedules(("auto", *list_schedules())),
        default="auto",
        metavar="NAME|FILE.csv",
        help=f"{', '.join(list_schedules())}, or a CSV file of actions; default auto: Megatron's "
        "own, 1f1b or interleaved",
    )
    parser.add_argument(
        "--compare", action="store_true", help="compare all schedules, and recommend one"
    )
    add_gpu_memory(parser)
    parser.add_argument("--rank", type=whole_number, metavar="R", help="show this rank only")
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
    ranks = _ranks(request, args.rank)
    pictures = _checked_pictures(args, request)
    most = MAX_EXPORTED if args.html or args.trace else MAX_DRAWN
    wants_grid = (pictures or not prints_json(args)) and too_large(shape, most) is None
    grid = Grid.of(request.build(), ranks) if wants_grid else None
    rows = rows_of(request, ranks, grid)
    if grid is not None:
        _write_pictures(args, request, grid, rows)
    if args.json is not None:
        content = json.dumps([as_json(row) for row in rows], indent=2)
        write_output("plan: --json", args.json, f"{content}\n")
    if not prints_json(args):
        _print_all(request, rows, grid, pictures)
    return exit_code(request, rows)


def _compare(args: argparse.Namespace, request: Request) -> int:
    from rich.console import Console

    wrong = {"--rank": args.rank, "--svg": args.svg, "--trace": args.trace, "--json": args.json}
    if args.schedule != "auto" and request.file is None:
        wrong["--schedule"] = args.schedule
    for option in (option for option, value in wrong.items() if value is not None):
        raise ConfigError(f"plan: {option} has no effect with --compare; leave it out")
    check_output("plan: --html", args.html)
    _ranks(request, None)
    comparison = compare(request)
    if args.html is not None:
        page = as_html(comparison_steps(comparison), title=_title(request))
        write_output("plan: --html", args.html, page)
    console = Console(file=stream_next_to(args.html), highlight=False)
    console.print(f"Schedules for {_title(request)}", style="bold", soft_wrap=True)
    comparison.print(console)
    return 0


def _ranks(request: Request, rank: int | None) -> Sequence[int]:
    if rank is not None and not 0 <= rank < request.num_ranks:
        raise ConfigError(f"plan: --rank {rank} is outside 0..{request.num_ranks - 1}")
    ranks = range(request.num_ranks) if rank is None else (rank,)
    if len(ranks) * request.num_chunks > _MAX_PLANNED_CHUNKS:
        raise ConfigError(
            f"plan: {len(ranks)} ranks of {request.num_chunks} chunk(s): at most "
            f"{_MAX_PLANNED_CHUNKS} chunks are planned at once. Plan one rank with --rank, or "
            "fewer chunks"
        )
    return ranks


def _title(request: Request) -> str:
    return f"{request.num_ranks} ranks, {request.num_microbatches} microbatches"


def _checked_pictures(args: argparse.Namespace, request: Request) -> dict[str, Path]:
    """Check all outputs; return the files that the step is drawn into, by option."""
    paths = {"--json": args.json, "--svg": args.svg, "--html": args.html, "--trace": args.trace}
    outputs = {option: path for option, path in paths.items() if path is not None}
    for option, path in outputs.items():
        check_output(f"plan: {option}", path)
    printed = [option for option, path in outputs.items() if is_stdout(path)]
    if len(printed) > 1:
        names = " and ".join(printed)
        raise ConfigError(f"plan: {names} cannot both be written to standard output")
    outputs.pop("--json", None)
    for option in outputs:
        most = MAX_DRAWN if option == "--svg" else MAX_EXPORTED
        if (problem := too_large(request.shape(), most)) is not None:
            raise ConfigError(f"plan: {option}: {problem}")
    return outputs


def _write_pictures(
    args: argparse.Namespace, request: Request, grid: Grid, rows: Sequence[RankRow]
) -> None:
    if args.svg is not None:
        write_output("plan: --svg", args.svg, grid.as_svg())
    if args.html is not None:
        page = as_html([(grid, rows)], title=f"{request.schedule}: {_title(request)}")
        write_output("plan: --html", args.html, page)
    if args.trace is not None:
        write_output("plan: --trace", args.trace, as_trace(grid))


def _print_all(
    request: Request, rows: Sequence[RankRow], grid: Grid | None, pictures: dict[str, Path]
) -> None:
    # Only printed tables need rich.
    from rich.console import Console

    console = Console(file=stream_next_to(*pictures.values()), highlight=False)
    print_rows(console, request, rows)
    largest = " (the largest of the config)" if request.is_largest_of_many else ""
    count = f"{request.num_microbatches} microbatches{largest}"
    console.print(f"One step of {count}", style="bold", soft_wrap=True)
    problem = too_large(request.shape())
    if grid is None or problem is not None:
        console.print(f"No grid: {problem}.", soft_wrap=True)
    else:
        grid.print(console)
    for path in pictures.values():
        console.print(f"Drawn in {path}", markup=False, soft_wrap=True)
