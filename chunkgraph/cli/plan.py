"""``chunkgraph plan``: slots, graphs, memory and the picture of a schedule; needs no torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chunkgraph._outputs import check_output, is_stdout, output_file, stream_next_to, write_output
from chunkgraph._text import shorten, shown
from chunkgraph.cli.arguments import add_json, prints_json, whole_number
from chunkgraph.cli.plan_banks import (
    add_bank_arguments,
    banks_of,
    rows_of_a_rank,
    seq_counts_of,
)
from chunkgraph.cli.plan_grid import MAX_PANELS, Grid, too_large
from chunkgraph.cli.plan_tables import RankRow, as_json, print_tables
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import (
    PipelineShape,
    check_step,
    get_family,
    list_schedules,
    megatron_schedule_name,
)
from chunkgraph.slots import (
    BankSizes,
    ModelSizes,
    estimate_banks,
    estimate_memory,
    plan_slots,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from chunkgraph.settings import Config

__all__ = ["add_parser", "run"]

_EXAMPLE = "chunkgraph plan --pp 4 --vpp 2 --num-microbatches 8"
_DESCRIPTION = f"""\
Plan the slots of every rank and draw the schedule. Slots and graphs hold for every legal number of
microbatches; the bubble ratio and the grid are of one step: --num-microbatches, or the largest in
the config's train.num_microbatches. Times count in forwards; a backward takes two.

  {_EXAMPLE}
  chunkgraph plan configs/cpu/gpt_pp2_vpp2_cpu.yaml model.num_layers=16
"""
_EPILOG = """\
--json prints a list with one object per rank, also with --rank:
  rank, slots_per_chunk (list), num_graphs, peak_in_flight (all chunks together), bubble_ratio
  (idle share of the step); with a config also slot_bytes_per_chunk (list), slot_bytes,
  scratch_bytes, parameter_bytes, gradient_bytes (estimates); with length buckets or
  --cuda-graph-cp-sizes also banks (list of objects), which share the memory of their slots.
"""
_MAX_PLANNED_CHUNKS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A plan's input, from a config or from flags."""

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
    parser.add_argument("--pp", type=whole_number, metavar="P", help="pipeline-parallel size")
    parser.add_argument(
        "--vpp", type=whole_number, metavar="V", help="chunks on each rank (default 1)"
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
        choices=("auto", *list_schedules()),
        default="auto",
        help="default auto: the one Megatron runs, 1f1b or interleaved",
    )
    add_bank_arguments(parser)
    parser.add_argument("--rank", type=whole_number, metavar="R", help="show this rank only")
    add_json(parser)
    parser.add_argument(
        "--svg",
        type=output_file,
        metavar="FILE",
        help="draw the schedule into FILE; - is standard output",
    )
    parser.add_argument(
        "--full", action="store_true", help=f"print the whole grid, not {MAX_PANELS} panels of it"
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code.

    Raises:
        ConfigError: The arguments, the config or the sizes are wrong, or the picture cannot be
            written.
        OutputError: The picture could not be written after all.
    """
    request = _request(args)
    shape = check_step(
        request.schedule,
        num_ranks=request.num_ranks,
        num_microbatches=request.num_microbatches,
        num_chunks=request.num_chunks,
        group_size=request.group_size,
    )
    ranks = _ranks(request, args.rank)
    _check_outputs(args, shape)
    rows = [_row(request, shape, rank) for rank in ranks]
    has_grid = too_large(shape) is None and not (prints_json(args) and args.svg is None)
    grid = Grid.of(request.schedule, shape, ranks) if has_grid else None
    if args.svg is not None and grid is not None:
        write_output("plan: --svg", args.svg, grid.as_svg())
    if args.json is not None:
        content = json.dumps([as_json(row) for row in rows], indent=2)
        write_output("plan: --json", args.json, f"{content}\n")
    if not prints_json(args):
        _print_all(args, request, shape, rows, grid)
    return 0


def _request(args: argparse.Namespace) -> _Request:
    if args.config is not None and "=" in args.config and not Path(args.config).exists():
        # Without a config the first override takes its place.
        raise ConfigError(
            f"plan: {shown(args.config)} is an override, but there is no CONFIG before it"
        )
    if args.config is None and args.pp is None:
        raise ConfigError(f"plan: give a CONFIG or --pp, for example: {_EXAMPLE}")
    if args.config is None:
        if args.cuda_graph_cp_sizes or args.cuda_graph_max_packed_tokens is not None:
            raise ConfigError("plan: banks need a CONFIG, whose model they are estimated for")
        return _request_from_flags(args)
    for flag, value in (("--pp", args.pp), ("--vpp", args.vpp), ("--group-size", args.group_size)):
        if value is not None:
            raise ConfigError(
                f"plan: {flag} does not go with a CONFIG; override the file's own setting instead, "
                "for example pipeline.pipeline_model_parallel_size=4"
            )
    from chunkgraph.settings import load_config

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


def _check_outputs(args: argparse.Namespace, shape: PipelineShape) -> None:
    check_output("plan: --json", args.json)
    check_output("plan: --svg", args.svg)
    if args.svg is None:
        return
    if prints_json(args) and is_stdout(args.svg):
        raise ConfigError("plan: --json and --svg cannot both be written to standard output")
    if (problem := too_large(shape)) is not None:
        raise ConfigError(f"plan: --svg: {problem}")


def _row(request: _Request, shape: PipelineShape, rank: int) -> RankRow:
    family, model = get_family(request.schedule), request.model
    plan = plan_slots(
        request.num_ranks,
        request.num_chunks,
        request.group_size,
        rank=rank,
        schedule=request.schedule,
        max_num_microbatches=None if family.is_bounded else request.num_microbatches,
    )
    return RankRow(
        plan=plan,
        bubble_ratio=family.bubble_ratio(shape),
        memory=None
        if model is None
        else estimate_memory(plan, model, shared_slots=request.shared_slots),
        banks=estimate_banks(plan, model, request.banks)
        if model is not None and request.banks
        else (),
    )


def _print_all(
    args: argparse.Namespace,
    request: _Request,
    shape: PipelineShape,
    rows: Sequence[RankRow],
    grid: Grid | None,
) -> None:
    # rich is only needed to print for people.
    from rich.console import Console

    console = Console(file=stream_next_to(args.svg), highlight=False)
    if get_family(request.schedule).is_bounded:
        holds = "any legal number of microbatches"
    else:
        holds = f"up to {request.num_microbatches} microbatches"
    console.print(f"{request.schedule}: slots for {holds}", style="bold", soft_wrap=True)
    print_tables(console, rows)
    if request.seq_counts:
        numbers = ", ".join(map(str, request.seq_counts))
        times = f"{len(request.seq_counts)} times as many graphs, in the same memory"
        console.print(f"For {shorten(numbers)} packed sequences: {times}", soft_wrap=True)
    if request.is_hybrid:
        console.print("Memory is not estimated for hybrid models.", soft_wrap=True)
    largest = " (the largest of the config)" if request.is_largest_of_many else ""
    count = f"{request.num_microbatches} microbatches{largest}"
    console.print(f"One step of {count}", style="bold", soft_wrap=True)
    if grid is None:
        console.print(f"No grid: {too_large(shape)}.", soft_wrap=True)
    else:
        grid.print(console, is_full=args.full)
    if args.svg is not None:
        console.print(f"Drawn in {args.svg}", markup=False, soft_wrap=True)
