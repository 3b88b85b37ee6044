"""The input of ``chunkgraph plan``, from a configuration or from flags."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chunkgraph._text import shown
from chunkgraph.cli.plan_memory import omissions_of, sizes_of
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import (
    PipelineShape,
    Placement,
    Schedule,
    build_schedule,
    check_step,
    get_family,
    megatron_schedule_name,
    read_matching_schedule,
    read_schedule,
)
from chunkgraph.schedules.files import check_order
from chunkgraph.slots import ModelSizes, SlotPlan, plan_schedule, plan_slots

if TYPE_CHECKING:
    from chunkgraph.settings import Config

EXAMPLE = "chunkgraph plan --pp 4 --vpp 2 --num-microbatches 8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A plan's input, from a config or from flags.

    Attributes:
        schedule: Name of the schedule, or its CSV file.
        num_ranks: Pipeline-parallel size.
        num_chunks: Model chunks on each rank.
        group_size: Microbatch group size; None for the default.
        num_microbatches: Number of microbatches of the drawn step.
        file: The schedule of the file; None for a name.
        model: Sizes for the memory estimate; None without a config.
        gpu_bytes: Memory of a GPU for comparison, or None.
        omissions: What the memory estimate leaves out.
        notes: Further notes on the plan.
        is_for_megatron: Whether the pipeline is one of Megatron's.
    """

    schedule: str
    num_ranks: int
    num_chunks: int
    group_size: int | None
    num_microbatches: int
    file: Schedule | None = None
    model: ModelSizes | None = None
    gpu_bytes: int | None = None
    omissions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_for_megatron: bool = False

    @property
    def runs_in_megatron(self) -> bool:
        """Return whether Megatron's models can train with this schedule and with graphs."""
        if self.file is None:
            family = get_family(self.schedule)
            return family.placement is Placement.LOOP and family.is_bounded
        try:
            check_order(self.file)
        except ConfigError:
            return False
        return self.file.placement is Placement.LOOP

    @property
    def is_bounded(self) -> bool:
        """Return whether the slots hold for any number of microbatches."""
        return self.file is None and get_family(self.schedule).is_bounded

    def shape(self) -> PipelineShape:
        """Return the shape of the step.

        Raises:
            TopologyError: The sizes do not form a pipeline.
        """
        if self.file is not None:
            return PipelineShape(
                num_ranks=self.num_ranks,
                num_microbatches=self.num_microbatches,
                num_chunks=self.num_chunks,
            )
        return check_step(self.schedule, **self._sizes())

    def build(self) -> Schedule:
        """Build the schedule of the step.

        Raises:
            TopologyError: The sizes do not form a pipeline.
        """
        return self.file or build_schedule(self.schedule, **self._sizes())

    def plan(self, rank: int) -> SlotPlan:
        """Plan the slots of a rank."""
        if self.file is not None:
            return plan_schedule(self.file, rank)
        return plan_slots(
            self.num_ranks,
            self.num_chunks,
            self.group_size,
            rank=rank,
            schedule=self.schedule,
            max_num_microbatches=None if self.is_bounded else self.num_microbatches,
        )

    def _sizes(self) -> dict[str, Any]:
        return {
            "num_ranks": self.num_ranks,
            "num_microbatches": self.num_microbatches,
            "num_chunks": self.num_chunks,
            "group_size": self.group_size,
        }


def request_of(args: argparse.Namespace) -> Request:
    """Read the arguments, and the config if they name one.

    Raises:
        ConfigError: Arguments contradict each other, or a file is wrong.
    """
    sizes = {"--pp": args.pp, "--vpp": args.vpp, "--group-size": args.group_size}
    if args.config is None:
        if args.gpu_memory is not None:
            raise ConfigError("plan: --gpu-memory needs a CONFIG: the memory depends on its model")
        file = read_schedule(args.schedule)
        if file is None:
            return _from_flags(args)
        sizes["--num-microbatches"] = args.num_microbatches
        _check_unset(sizes, f"{file.name}, which has its own sizes; leave it out")
        return Request(
            schedule=file.name,
            num_ranks=file.num_ranks,
            num_chunks=file.num_chunks,
            group_size=None,
            num_microbatches=file.num_microbatches,
            file=file,
        )
    _check_unset(
        sizes,
        "a CONFIG; override the file's own setting instead, for example "
        "pipeline.pipeline_model_parallel_size=4",
    )
    if args.config.endswith(".csv"):
        raise ConfigError(f"plan: {shown(args.config)} is a schedule; write --schedule before it")
    from chunkgraph.settings import load_config

    return _from_config(args, load_config(args.config, args.overrides))


def _check_unset(sizes: Mapping[str, int | None], what: str) -> None:
    for flag in (flag for flag, value in sizes.items() if value is not None):
        raise ConfigError(f"plan: {flag} cannot be combined with {what}")


def _from_flags(args: argparse.Namespace) -> Request:
    if args.pp is None:
        raise ConfigError(f"plan: give a CONFIG or --pp, for example: {EXAMPLE}")
    num_chunks = args.vpp
    if num_chunks is None:
        num_chunks = 1 if args.schedule == "auto" else get_family(args.schedule).num_chunks or 2
    default = 2 * max(1, args.pp if args.group_size is None else args.group_size)
    return Request(
        schedule=schedule_name(args.schedule, num_chunks),
        num_ranks=args.pp,
        num_chunks=num_chunks,
        group_size=args.group_size,
        num_microbatches=default if args.num_microbatches is None else args.num_microbatches,
    )


def _from_config(args: argparse.Namespace, config: Config) -> Request:
    from chunkgraph.settings.words import facts_of

    pipeline = config.pipeline
    counts, setting = config.train.num_microbatches, "train.num_microbatches"
    if args.num_microbatches is not None:
        counts, setting = (args.num_microbatches,), "--num-microbatches"
    num_ranks, num_chunks = pipeline.pipeline_model_parallel_size, pipeline.num_model_chunks
    is_hybrid = config.model.hybrid_layer_pattern is not None
    if is_hybrid and args.gpu_memory is not None:
        raise ConfigError("plan: --gpu-memory: memory is not estimated for hybrid models")
    schedule = pipeline.schedule if args.schedule == "auto" else args.schedule
    file = read_matching_schedule(schedule, num_ranks, num_chunks, counts, setting)
    # The memory of Mamba layers is not estimated; a sum without them would be wrong.
    omissions = ["Memory is not estimated for hybrid models."]
    if not is_hybrid:
        omissions = omissions_of(facts_of(config).__getattr__)
    return Request(
        schedule=schedule_name(schedule, num_chunks),
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        group_size=pipeline.microbatch_group_size_per_vp_stage,
        num_microbatches=max(counts),
        file=file,
        model=None if is_hybrid else _model(config),
        gpu_bytes=args.gpu_memory,
        omissions=tuple(omissions),
        notes=_packed_notes(config),
        is_for_megatron=True,
    )


def _model(config: Config) -> ModelSizes:
    from chunkgraph.settings.words import facts_of

    model, pipeline = config.model, config.pipeline
    facts = facts_of(config)
    # With context_parallel_sizes, the rows are already those of a rank.
    ranks = pipeline.context_parallel_size
    return sizes_of(
        lambda name: getattr(facts, name),
        seq_length=-(-config.tokens_per_sequence // ranks),
        micro_batch_size=config.train.micro_batch_size,
        num_copies=pipeline.data_parallel_size * ranks,
        is_local=model.layer_spec == "local"
        or (model.layer_spec == "auto" and config.device == "cpu"),
    )


def _packed_notes(config: Config) -> tuple[str, ...]:
    """Count the graphs of each slot for the sizes that packed microbatches may have."""
    from chunkgraph.settings import resolved

    packing = resolved(config).packing
    counts = {
        "context-parallel sizes": max(1, len(packing.context_parallel_sizes)),
        "lengths": len({*packing.buckets} - {1}) + 1,
        "numbers of sequences": len({packing.max_packed_seqs, *(packing.seq_buckets or ())}),
    }
    parts = " x ".join(f"{count} {name}" for name, count in counts.items() if count > 1)
    if not parts:
        return ()
    times = math.prod(counts.values())
    return (f"Each graph is captured {times} times in the same slots: for {parts}.",)


def schedule_name(requested: str, num_chunks: int) -> str:
    """Return a schedule's name or file; for ``auto`` the name of Megatron's own."""
    return megatron_schedule_name(num_chunks) if requested == "auto" else requested
