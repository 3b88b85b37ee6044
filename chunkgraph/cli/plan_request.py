"""The input of ``chunkgraph plan``, from a configuration or from flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chunkgraph._text import shown
from chunkgraph.cli.plan_banks import banks_of, rows_of_a_rank, seq_counts_of
from chunkgraph.cli.plan_costs import costs_of
from chunkgraph.cli.plan_model import sizes_of, value_of_config
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import CostModel, get_family, megatron_schedule_name
from chunkgraph.slots import BankSizes, ModelSizes

if TYPE_CHECKING:
    from chunkgraph.settings import Config

__all__ = ["EXAMPLE", "Request", "request_of"]

EXAMPLE = "chunkgraph plan --pp 4 --vpp 2 --num-microbatches 8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A plan's input, from a config or from flags.

    Attributes:
        schedule: Name of the schedule.
        num_ranks: Pipeline-parallel size.
        num_chunks: Model chunks on each rank.
        group_size: Microbatch group size; None for the default.
        num_microbatches: Number of microbatches of the drawn step.
        costs: Costs of one action on one chunk; None if not measured.
        model: Sizes for the memory estimate; None without a config.
        is_largest_of_many: Whether the config also has steps of fewer microbatches.
        shared_slots: Whether the chunks of a rank share slots.
        banks: Banks for the memory estimate.
        seq_counts: Numbers of packed sequences that are captured.
        gpu_bytes: Memory of a GPU for comparison, or None.
        notes: Notes on what the plan omits or assumes.
        is_for_megatron: Whether the pipeline is one of Megatron's.
    """

    schedule: str
    num_ranks: int
    num_chunks: int
    group_size: int | None
    num_microbatches: int
    costs: CostModel | None
    model: ModelSizes | None = None
    is_largest_of_many: bool = False
    shared_slots: bool = False
    banks: tuple[BankSizes, ...] = ()
    seq_counts: tuple[int, ...] = ()
    gpu_bytes: int | None = None
    notes: tuple[str, ...] = ()
    is_for_megatron: bool = False


def request_of(args: argparse.Namespace) -> Request:
    """Read the arguments, and the config if they name one.

    Raises:
        ConfigError: Arguments contradict each other, or a file is wrong.
    """
    if args.config is not None and "=" in args.config and not Path(args.config).exists():
        # Without a config the first override takes its place.
        raise ConfigError(
            f"plan: {shown(args.config)} is an override, but there is no CONFIG before it"
        )
    if args.config is None and args.pp is None:
        raise ConfigError(f"plan: give a CONFIG or --pp, for example: {EXAMPLE}")
    if args.config is None:
        if args.cuda_graph_cp_sizes or args.cuda_graph_max_packed_tokens is not None:
            raise ConfigError("plan: banks need a CONFIG: their memory depends on its model")
        if args.gpu_memory is not None:
            raise ConfigError("plan: --gpu-memory needs a CONFIG: the memory depends on its model")
        return _from_flags(args)
    for flag, value in (("--pp", args.pp), ("--vpp", args.vpp), ("--group-size", args.group_size)):
        if value is not None:
            raise ConfigError(
                f"plan: {flag} cannot be combined with a CONFIG; override the file's own setting "
                "instead, for example pipeline.pipeline_model_parallel_size=4"
            )
    from chunkgraph.settings import load_config

    return _from_config(args, load_config(args.config, args.overrides))


def _from_flags(args: argparse.Namespace) -> Request:
    num_chunks = args.vpp
    if num_chunks is None:
        num_chunks = 1 if args.schedule == "auto" else get_family(args.schedule).num_chunks or 2
    default = 2 * max(1, args.pp if args.group_size is None else args.group_size)
    return Request(
        schedule=_schedule_name(args.schedule, args.pp, num_chunks),
        num_ranks=args.pp,
        num_chunks=num_chunks,
        group_size=args.group_size,
        num_microbatches=default if args.num_microbatches is None else args.num_microbatches,
        costs=costs_of(args.costs),
    )


def _from_config(args: argparse.Namespace, config: Config) -> Request:
    pipeline, model, counts = config.pipeline, config.model, config.train.num_microbatches
    num_ranks = pipeline.pipeline_model_parallel_size
    num_chunks = pipeline.virtual_pipeline_model_parallel_size or 1
    if model.hybrid_layer_pattern is not None and args.cuda_graph_cp_sizes:
        raise ConfigError(
            "plan: --cuda-graph-cp-sizes shows memory, which is not estimated for a hybrid model; "
            "leave it out, or set model.hybrid_layer_pattern=null"
        )
    if model.hybrid_layer_pattern is not None and args.gpu_memory is not None:
        raise ConfigError("plan: --gpu-memory: memory is not estimated for hybrid models")
    is_local = model.layer_spec == "local" or (
        model.layer_spec == "auto" and config.device == "cpu"
    )
    schedule = pipeline.schedule if args.schedule == "auto" else args.schedule
    if args.schedule == "auto" and pipeline.has_schedule_file:
        raise ConfigError(
            f"plan: pipeline.schedule={schedule} is valid, but only schedules by name are planned; "
            "add --schedule NAME"
        )
    banks = banks_of(args, config)
    return Request(
        schedule=_schedule_name(schedule, num_ranks, num_chunks),
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        group_size=pipeline.microbatch_group_size_per_vp_stage,
        num_microbatches=max(counts) if args.num_microbatches is None else args.num_microbatches,
        costs=costs_of(args.costs),
        # The memory of Mamba layers is not estimated; a sum without them would be wrong.
        model=None
        if model.hybrid_layer_pattern is not None
        else sizes_of(
            value_of_config(config),
            seq_length=rows_of_a_rank(config, banks),
            micro_batch_size=config.train.micro_batch_size,
            num_copies=pipeline.data_parallel_size * pipeline.context_parallel_size,
            is_local=is_local,
        ),
        is_largest_of_many=args.num_microbatches is None and len(set(counts)) > 1,
        shared_slots=config.capture.shared_slots,
        banks=banks,
        seq_counts=seq_counts_of(args, config, banks),
        gpu_bytes=args.gpu_memory,
        notes=()
        if model.hybrid_layer_pattern is None
        else ("Memory is not estimated for hybrid models.",),
        is_for_megatron=True,
    )


def _schedule_name(requested: str, num_ranks: int, num_chunks: int) -> str:
    return megatron_schedule_name(num_ranks, num_chunks) if requested == "auto" else requested
