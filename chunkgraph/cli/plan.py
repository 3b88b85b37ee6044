"""``chunkgraph plan``: slots, graphs, memory and the picture of a schedule; needs no torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chunkgraph.cli.plan_banks import (
    add_bank_arguments,
    banks_of,
    rows_of_a_rank,
    seq_counts_of,
)
from chunkgraph.cli.plan_tables import RankRow, as_json, print_tables
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import (
    Op,
    Schedule,
    Simulation,
    build_schedule,
    draw_svg,
    get_family,
    list_schedules,
    megatron_schedule_name,
    simulate,
    text_panels,
)
from chunkgraph.schedules.draw_text import legend
from chunkgraph.slots import (
    BankSizes,
    ModelSizes,
    assign_slots,
    estimate_banks,
    estimate_memory,
    plan_all_ranks,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.console import Console

    from chunkgraph.config import Config

__all__ = ["add_parser", "run"]

_EXAMPLE = "chunkgraph plan --pp 4 --vpp 2 --num-microbatches 8"
_DESCRIPTION = f"""\
Plan the slots of every rank and draw the schedule. Slots and graphs hold for every legal number of
microbatches; the bubble ratio and the grid are of one step: --num-microbatches, or the largest in
the config's train.num_microbatches. Times count in forwards; a backward takes two.

  {_EXAMPLE}
  chunkgraph plan configs/gpt_pp2_vpp2_cpu.yaml model.num_layers=16
"""
_EPILOG = """\
--json prints a list with one object per rank, also with --rank:
  rank, slots_per_chunk (list), num_graphs, peak_in_flight (all chunks together), bubble_ratio
  (idle share of the step); with a config also slot_bytes_per_chunk (list), slot_bytes,
  scratch_bytes, parameter_bytes, gradient_bytes (estimates); with length buckets or
  --cuda-graph-cp-sizes also banks (list of objects), which share the memory of their slots.
"""
# Colours by name, because terminals with few of them turn finer ones into the same.
_STYLES = {
    Op.F: "white on blue",
    Op.B: "black on green",
    Op.I: "black on cyan",
    Op.W: "black on yellow",
}
_MAX_PANELS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What to plan, from a config or from flags."""

    schedule: str
    num_ranks: int
    num_chunks: int
    group_size: int | None
    num_microbatches: int
    model: ModelSizes | None
    is_largest_of_many: bool
    is_hybrid: bool = False
    shared_slots: bool = False
    banks: tuple[BankSizes, ...] = ()
    seq_counts: tuple[int, ...] = ()


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
    parser.add_argument("--pp", type=int, metavar="P", help="pipeline-parallel size")
    parser.add_argument("--vpp", type=int, metavar="V", help="chunks on each rank (default 1)")
    parser.add_argument(
        "--group-size", type=int, metavar="G", help="microbatch group size (default P)"
    )
    parser.add_argument(
        "--num-microbatches",
        type=int,
        metavar="M",
        help="microbatches of the step that is drawn (default 2 G; with CONFIG its largest)",
    )
    parser.add_argument(
        "--schedule",
        choices=("auto", *list_schedules()),
        default="auto",
        help="default auto: the one Megatron runs, 1f1b or interleaved",
    )
    add_bank_arguments(parser)
    parser.add_argument("--rank", type=int, metavar="R", help="tell of this rank only")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the schedule into FILE")
    parser.add_argument(
        "--full", action="store_true", help=f"print the whole grid, not {_MAX_PANELS} panels of it"
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code.

    Raises:
        ConfigError: The arguments, the config or the sizes are wrong, or the picture cannot be
            written.
    """
    request = _request(args)
    ranks = _ranks(request, args.rank)
    # The schedule is built first: it refuses an illegal number of microbatches.
    schedule = build_schedule(
        request.schedule,
        num_ranks=request.num_ranks,
        num_microbatches=request.num_microbatches,
        num_chunks=request.num_chunks,
        group_size=request.group_size,
    )
    rows, simulation = _plan(request, schedule, ranks)
    slots = assign_slots(schedule)
    if args.svg is not None:
        _write(args.svg, draw_svg(simulation, slots=slots, ranks=ranks))
    if args.json:
        print(json.dumps([as_json(row) for row in rows], indent=2))
    else:
        _print_all(args, request, rows, simulation, slots, ranks)
    return 0


def _request(args: argparse.Namespace) -> _Request:
    if args.config is not None and "=" in args.config and not Path(args.config).exists():
        # Without a config the first override takes its place.
        raise ConfigError(f"plan: {args.config!r} is an override, but there is no CONFIG before it")
    if args.config is None and args.pp is None:
        raise ConfigError(f"plan: give a CONFIG or --pp, for example: {_EXAMPLE}")
    if args.config is None:
        if args.cuda_graph_cp_sizes or args.max_tokens_per_rank is not None:
            raise ConfigError("plan: banks need a CONFIG, whose model they are estimated for")
        return _request_from_flags(args)
    for flag, value in (("--pp", args.pp), ("--vpp", args.vpp), ("--group-size", args.group_size)):
        if value is not None:
            raise ConfigError(
                f"plan: {flag} does not go with a CONFIG; override the file's own setting instead, "
                "for example pipeline.pipeline_model_parallel_size=4"
            )
    from chunkgraph.config import load_config

    return _request_from_config(args, load_config(args.config, args.overrides))


def _request_from_flags(args: argparse.Namespace) -> _Request:
    num_chunks = 1 if args.vpp is None else args.vpp
    default = 2 * max(1, args.pp if args.group_size is None else args.group_size)
    return _Request(
        schedule=_schedule_name(args.schedule, args.pp, num_chunks),
        num_ranks=args.pp,
        num_chunks=num_chunks,
        group_size=args.group_size,
        num_microbatches=default if args.num_microbatches is None else args.num_microbatches,
        model=None,
        is_largest_of_many=False,
    )


def _request_from_config(args: argparse.Namespace, config: Config) -> _Request:
    pipeline, model, counts = config.pipeline, config.model, config.train.num_microbatches
    num_ranks = pipeline.pipeline_model_parallel_size
    num_chunks = pipeline.virtual_pipeline_model_parallel_size or 1
    if model.hybrid_layer_pattern is not None and args.cuda_graph_cp_sizes:
        raise ConfigError(
            "plan: --cuda-graph-cp-sizes is about memory, which is not estimated for a hybrid "
            "model; leave it out, or set model.hybrid_layer_pattern=null"
        )
    is_local = model.layer_spec == "local" or (
        model.layer_spec == "auto" and config.device == "cpu"
    )
    parts = model.recompute_modules if model.recompute_granularity == "selective" else ()
    by_layer = model.recompute_method == "block"
    banks = banks_of(args, config)
    return _Request(
        schedule=_schedule_name(args.schedule, num_ranks, num_chunks),
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        group_size=pipeline.microbatch_group_size_per_vp_stage,
        num_microbatches=max(counts) if args.num_microbatches is None else args.num_microbatches,
        # What Mamba layers keep is not estimated; without them nothing would be right.
        model=None
        if model.hybrid_layer_pattern is not None
        else ModelSizes(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            ffn_hidden_size=model.ffn_hidden_size,
            num_attention_heads=model.num_attention_heads,
            seq_length=rows_of_a_rank(config, banks),
            micro_batch_size=config.train.micro_batch_size,
            vocab_size=model.vocab_size,
            bytes_per_element=4 if model.params_dtype == "float32" else 2,
            tensor_parallel_size=pipeline.tensor_model_parallel_size,
            # Megatron's local layers keep the attention scores, unless they are recomputed.
            has_flash_attention=not is_local or "core_attn" in parts,
            has_gated_mlp=model.swiglu,
            has_tied_embeddings=not model.untie_embeddings_and_output_weights,
            recompute_group_size=1 if by_layer else model.recompute_num_layers,
            num_recomputed_layers=model.recompute_num_layers if by_layer else None,
        ),
        is_largest_of_many=args.num_microbatches is None and len(set(counts)) > 1,
        is_hybrid=model.hybrid_layer_pattern is not None,
        shared_slots=config.capture.shared_slots,
        banks=banks,
        seq_counts=seq_counts_of(args, config, banks),
    )


def _schedule_name(wanted: str, num_ranks: int, num_chunks: int) -> str:
    return megatron_schedule_name(num_ranks, num_chunks) if wanted == "auto" else wanted


def _ranks(request: _Request, rank: int | None) -> Sequence[int]:
    if rank is None:
        return range(request.num_ranks)
    if not 0 <= rank < request.num_ranks:
        raise ConfigError(f"plan: --rank {rank} is outside 0..{request.num_ranks - 1}")
    return (rank,)


def _plan(
    request: _Request, schedule: Schedule, ranks: Sequence[int]
) -> tuple[list[RankRow], Simulation]:
    is_bounded = get_family(request.schedule).is_bounded
    plans = plan_all_ranks(
        request.num_ranks,
        request.num_chunks,
        request.group_size,
        schedule=request.schedule,
        max_num_microbatches=None if is_bounded else request.num_microbatches,
    )
    simulation = simulate(schedule)
    model = request.model
    rows = [
        RankRow(
            plan=plans[rank],
            bubble_ratio=simulation.bubble_ratio(rank),
            memory=None
            if model is None
            else estimate_memory(plans[rank], model, shared_slots=request.shared_slots),
            banks=estimate_banks(plans[rank], model, request.banks)
            if model is not None and request.banks
            else (),
        )
        for rank in ranks
    ]
    return rows, simulation


def _print_all(
    args: argparse.Namespace,
    request: _Request,
    rows: Sequence[RankRow],
    simulation: Simulation,
    slots: Mapping[tuple[int, int], int],
    ranks: Sequence[int],
) -> None:
    # rich is only needed to print for people.
    from rich.console import Console

    console = Console(highlight=False)
    schedule = simulation.schedule
    if get_family(request.schedule).is_bounded:
        holds = "any legal number of microbatches"
    else:
        holds = f"up to {request.num_microbatches} microbatches"
    console.print(f"{schedule.name}: slots for {holds}", style="bold", soft_wrap=True)
    print_tables(console, rows)
    if request.seq_counts:
        numbers = ", ".join(map(str, request.seq_counts))
        times = f"{len(request.seq_counts)} times as many graphs, in the same memory"
        console.print(f"For {numbers} packed sequences: {times}", soft_wrap=True)
    if request.is_hybrid:
        console.print("Memory is not estimated for hybrid models.", soft_wrap=True)
    largest = " (the largest of the config)" if request.is_largest_of_many else ""
    count = f"{schedule.num_microbatches} microbatches{largest}"
    console.print(f"One step of {count}", style="bold", soft_wrap=True)
    _print_grid(console, simulation, slots, ranks, is_full=args.full)
    if args.svg is not None:
        console.print(f"Drawn in {args.svg}", markup=False, soft_wrap=True)


def _print_grid(
    console: Console,
    simulation: Simulation,
    slots: Mapping[tuple[int, int], int],
    ranks: Sequence[int],
    *,
    is_full: bool,
) -> None:
    from rich.text import Text

    panels = text_panels(simulation, slots=slots, width=console.width, ranks=ranks)
    shown = panels if is_full else panels[:_MAX_PANELS]
    digits = len(str(max(ranks)))
    for panel in shown:
        console.print(f"time {panel.start_ms:g} to {panel.end_ms:g}", style="dim")
        for rank, cells in panel.rows:
            line = Text(f"rank {rank:>{digits}} |")
            for cell in cells:
                # The gap after an action stays white, so that neighbours do not run together.
                text = cell.text.rstrip(" ")
                line.append(text, style="" if cell.op is None else _STYLES[cell.op])
                line.append(cell.text[len(text) :])
            line.rstrip()
            console.print(line, soft_wrap=True)
        console.print()
    if len(panels) > len(shown):
        rest = len(panels) - len(shown)
        console.print(f"... {rest} more panels: --full prints them, --svg FILE draws them")
    schedule = simulation.schedule
    has_split_backward = any(action.op is Op.I for action in schedule.actions[0])
    how_to_read = legend(schedule.num_chunks, has_slots=True, has_split_backward=has_split_backward)
    console.print(how_to_read, style="dim", soft_wrap=True)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(
            f"plan: cannot write the picture to {path}: {error.strerror or error}. Give a file in "
            "a folder that exists and can be written to"
        ) from None
