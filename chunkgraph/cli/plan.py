"""``chunkgraph plan``: plan slots, graphs and memory of a schedule, and draw it; needs no torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chunkgraph._outputs import check_output, is_stdout, output_file, stream_next_to, write_output
from chunkgraph.cli.arguments import add_json, prints_json, whole_number
from chunkgraph.cli.plan_banks import add_bank_arguments
from chunkgraph.cli.plan_compare import COMPARE_HELP, compare, comparison_steps
from chunkgraph.cli.plan_costs import COSTS_HELP, add_costs_argument
from chunkgraph.cli.plan_export import as_html, as_trace
from chunkgraph.cli.plan_grid import MAX_PANELS, Grid, too_large
from chunkgraph.cli.plan_memory import add_gpu_memory
from chunkgraph.cli.plan_request import EXAMPLE, Request, request_of
from chunkgraph.cli.plan_rows import exit_code, print_rows, rows_of, shape_of
from chunkgraph.cli.plan_tables import RankRow, as_json
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import PipelineShape, list_schedules
from chunkgraph.settings.pipeline import FILE_SUFFIX

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser", "run"]

_DESCRIPTION = f"""\
Plan the slots of every rank and draw the schedule. Slots and graphs hold for
every legal number of microbatches; the bubble ratio and the grid are of one
step: --num-microbatches, or the largest in the config's train.num_microbatches.
Without --costs times count in forwards; a backward takes two.

  {EXAMPLE}
  chunkgraph plan --pp 4 --costs F=1.6,B=4.6,I=2.4,W=2.4 --compare
  chunkgraph plan --schedule mine.csv
  chunkgraph plan configs/cpu/gpt_pp2_vpp2_cpu.yaml model.num_layers=16
"""
_EPILOG = f"""\
--json prints a list with one object per rank, also with --rank:
  rank, slots_per_chunk (list), num_graphs, peak_in_flight (all chunks
  together), bubble_ratio (idle share of the step); with --costs also step_ms;
  with a config also slot_bytes_per_chunk (list), slot_bytes, scratch_bytes,
  parameter_bytes, gradient_bytes, optimizer_bytes, logit_bytes (estimates);
  with length buckets or --cuda-graph-cp-sizes also banks (list of objects),
  which share the memory of their slots. With --gpu-memory the exit code is 1 if
  a rank does not fit.

{COSTS_HELP}
{COMPARE_HELP}"""
_MAX_PLANNED_CHUNKS = 20_000
_MAX_DRAWN = 10_000
_MAX_EXPORTED = 200_000
"""Maximum number of actions in a page or trace, which zoom; ``_MAX_DRAWN``: in a picture."""


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
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings that replace the file's, such as pipeline.pipeline_model_parallel_size=4",
    )
    parser.add_argument("--pp", type=whole_number, metavar="P", help="pipeline-parallel size")
    parser.add_argument(
        "--vpp",
        type=whole_number,
        metavar="V",
        help="chunks on each rank (default 1, or the schedule's)",
    )
    parser.add_argument(
        "--group-size", type=whole_number, metavar="G", help="microbatch group size (default P)"
    )
    parser.add_argument(
        "--num-microbatches",
        type=whole_number,
        metavar="M",
        help="microbatches of the step that is drawn (default 2 G; with CONFIG its largest)",
    )
    parser.add_argument(
        "--schedule",
        choices=_Schedules(("auto", *list_schedules())),
        default="auto",
        metavar="NAME|FILE.csv",
        help=f"{', '.join(list_schedules())}, or a CSV file of actions; default auto: the one "
        "that Megatron runs, 1f1b or interleaved",
    )
    add_costs_argument(parser)
    parser.add_argument(
        "--compare", action="store_true", help="print a table of all schedules, and recommend one"
    )
    add_bank_arguments(parser)
    add_gpu_memory(parser)
    parser.add_argument("--rank", type=whole_number, metavar="R", help="show this rank only")
    add_json(parser)
    parser.add_argument(
        "--svg",
        type=output_file,
        metavar="FILE",
        help="draw the schedule into FILE; - is standard output",
    )
    parser.add_argument(
        "--html",
        type=output_file,
        metavar="FILE",
        help="draw it on a page that zooms; with --compare, all schedules",
    )
    parser.add_argument(
        "--trace",
        type=output_file,
        metavar="FILE",
        help="write the step as a trace for Perfetto or chrome://tracing",
    )
    parser.add_argument(
        "--full", action="store_true", help=f"print the whole grid, not {MAX_PANELS} panels of it"
    )


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
    shape = shape_of(request)
    ranks = _ranks(request, args.rank)
    _check_outputs(args, request, shape)
    wants_grid = bool(_pictures(args)) or request.costs is not None or not prints_json(args)
    most = _MAX_EXPORTED if args.html or args.trace else _MAX_DRAWN
    has_grid = wants_grid and too_large(shape, most) is None
    grid = Grid.of(request.build(), ranks, request.costs) if has_grid else None
    rows = rows_of(request, shape, ranks, grid)
    if grid is not None:
        _write_pictures(args, request, grid, rows)
    if args.json is not None:
        _write_json(args.json, [as_json(row) for row in rows])
    if not prints_json(args):
        is_printed = too_large(shape) is None
        _print_all(args, request, shape, rows, grid if is_printed else None)
    return exit_code(request, rows)


def _compare(args: argparse.Namespace, request: Request) -> int:
    wrong = {"--rank": args.rank is not None, "--svg": args.svg is not None, "--full": args.full}
    wrong["--trace"] = args.trace is not None
    wrong["--schedule"] = args.schedule != "auto" and request.file is None
    for option in (option for option, is_given in wrong.items() if is_given):
        raise ConfigError(f"plan: {option} has no effect with --compare; leave it out")
    check_output("plan: --json", args.json)
    check_output("plan: --html", args.html)
    _ranks(request, None)
    comparison = compare(request)
    if args.html is not None:
        steps = comparison_steps(request, comparison)
        page = as_html(steps, title=_title(request), has_costs=request.costs is not None)
        write_output("plan: --html", args.html, page)
    if args.json is not None:
        _write_json(args.json, comparison.as_json())
    if not prints_json(args):
        from rich.console import Console

        console = Console(file=stream_next_to(args.html), highlight=False)
        console.print(f"Schedules for {_title(request)}", style="bold", soft_wrap=True)
        comparison.print(console)
    return 0


def _write_json(path: Path, content: Sequence[dict[str, object]]) -> None:
    write_output("plan: --json", path, f"{json.dumps(content, indent=2)}\n")


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


def _pictures(args: argparse.Namespace) -> dict[str, Path]:
    """Return the files that the step is drawn into, by option."""
    paths = {"--svg": args.svg, "--html": args.html, "--trace": args.trace}
    return {option: path for option, path in paths.items() if path is not None}


def _check_outputs(args: argparse.Namespace, request: Request, shape: PipelineShape) -> None:
    check_output("plan: --json", args.json)
    pictures = _pictures(args)
    for option, path in pictures.items():
        check_output(f"plan: {option}", path)
    if request.costs is not None and (problem := too_large(shape)) is not None:
        raise ConfigError(f"plan: --costs: {problem}")
    outputs = pictures | ({"--json": args.json} if args.json is not None else {})
    printed = sorted(option for option, path in outputs.items() if is_stdout(path))
    if len(printed) > 1:
        names = " and ".join(printed)
        raise ConfigError(f"plan: {names} cannot both be written to standard output")
    for option in pictures:
        most = _MAX_DRAWN if option == "--svg" else _MAX_EXPORTED
        if (problem := too_large(shape, most)) is not None:
            raise ConfigError(f"plan: {option}: {problem}")


def _write_pictures(
    args: argparse.Namespace, request: Request, grid: Grid, rows: Sequence[RankRow]
) -> None:
    if args.svg is not None:
        write_output("plan: --svg", args.svg, grid.as_svg())
    if args.html is not None:
        title = f"{request.schedule}: {_title(request)}"
        page = as_html([(grid, rows)], title=title, has_costs=request.costs is not None)
        write_output("plan: --html", args.html, page)
    if args.trace is not None:
        write_output("plan: --trace", args.trace, as_trace(grid))


def _print_all(
    args: argparse.Namespace,
    request: Request,
    shape: PipelineShape,
    rows: Sequence[RankRow],
    grid: Grid | None,
) -> None:
    # Only printed tables need rich.
    from rich.console import Console

    pictures = _pictures(args)
    console = Console(file=stream_next_to(*pictures.values()), highlight=False)
    print_rows(console, request, rows)
    largest = " (the largest of the config)" if request.is_largest_of_many else ""
    count = f"{request.num_microbatches} microbatches{largest}"
    step_ms = rows[0].step_ms
    step = "" if step_ms is None else f": {step_ms:.1f} ms"
    console.print(f"One step of {count}{step}", style="bold", soft_wrap=True)
    if grid is None:
        console.print(f"No grid: {too_large(shape)}.", soft_wrap=True)
    else:
        grid.print(console, is_full=args.full)
    for path in pictures.values():
        console.print(f"Drawn in {path}", markup=False, soft_wrap=True)
