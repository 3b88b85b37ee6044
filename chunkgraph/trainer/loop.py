"""Train all steps of a configuration, eagerly or with chunk graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from chunkgraph.engine.options import OnCapture
from chunkgraph.megatron.attachment import MegatronChunkGraphs
from chunkgraph.megatron.features.experts.state import take_expert_metrics
from chunkgraph.megatron.features.fp8.feature import reset_fp8
from chunkgraph.settings import Config
from chunkgraph.trainer.trained_model import StepRecord, TrainedModel

__all__ = ["RankTotals", "TrainingRun", "run_training"]

_Value = TypeVar("_Value")


def _first(values: Sequence[_Value]) -> _Value:
    return values[0]


def _over_ranks(combine: Callable[[Sequence[Any]], Any], default: Any) -> Any:
    """Declare how to combine the values of all ranks into the job's value."""
    return field(default_factory=lambda: default, metadata={"combine": combine})


@dataclass(kw_only=True)
class RankTotals:
    """Totals of a run on one rank; `combined` computes the totals of the job.

    Attributes:
        capture_sessions: number of sessions that captured graphs.
        captures_after_first_session: graph pairs captured in later sessions, except captures with
            more room.
        slots_per_chunk: number of slots of each chunk; empty for an eager run.
        num_graphs: number of captured graphs, forward and backward.
        dropped_tokens: tokens for which an expert of this rank had no room, in a run with graphs.
        overflow_reruns: number of repeated steps, by the feature that had no room.
        recaptures: the reason of each capture with more room.
        stash_bytes: bytes of the stash's device pages.
        bytes_without_stash: bytes that slots would hold without the stash.
        replays_of_bank: number of replayed forward graphs by bank, if there are several banks.
        missing_banks: number of eager steps by the bank that has no graphs.
        memsets_kept: see `CaptureReport`.
        reserved_bytes: most memory that torch held on the device; 0 on a CPU.
        gpu_used_bytes: memory in use on the whole GPU after the last step, by all processes,
            including NCCL, libraries, graphs and CUDA itself; 0 on a CPU.
    """

    capture_sessions: int = _over_ranks(_first, 0)
    captures_after_first_session: int = _over_ranks(max, 0)
    slots_per_chunk: Sequence[int] = _over_ranks(list, ())
    num_graphs: int = _over_ranks(sum, 0)
    dropped_tokens: int = _over_ranks(sum, 0)
    overflow_reruns: Mapping[str, int] = _over_ranks(_first, {})
    recaptures: Sequence[str] = _over_ranks(_first, ())
    stash_bytes: int = _over_ranks(list, 0)
    bytes_without_stash: int = _over_ranks(list, 0)
    replays_of_bank: Mapping[str, int] = _over_ranks(list, {})
    missing_banks: Mapping[str, int] = _over_ranks(list, {})
    memsets_kept: str = _over_ranks(list, "")
    reserved_bytes: int = _over_ranks(list, 0)
    gpu_used_bytes: int = _over_ranks(list, 0)

    @classmethod
    def combined(cls, ranks: Sequence[RankTotals]) -> dict[str, Any]:
        """Combine the totals of all ranks as the fields declare."""
        return {
            item.name: item.metadata["combine"]([getattr(rank, item.name) for rank in ranks])
            for item in fields(cls)
        }


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run of all steps on this rank.

    Attributes:
        steps: one record for each step.
        totals: totals of the run.
        parameters: final parameters and buffers on the CPU, named ``chunk index.name``.
    """

    steps: Sequence[StepRecord]
    totals: RankTotals
    parameters: Mapping[str, torch.Tensor]


def run_training(
    config: Config,
    device: torch.device,
    *,
    use_graphs: bool,
    ddp_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    on_step: Callable[[StepRecord], None] = lambda _: None,
    on_capture: OnCapture | None = None,
) -> TrainingRun:
    """Build the model from the seed, train every step of ``config``, and free the model.

    Args:
        config: the run.
        device: this rank's device; process groups must be initialized.
        use_graphs: whether to attach chunk graphs.
        ddp_options: more fields of Megatron's DistributedDataParallelConfig.
        model_options: more arguments of `build_model`.
        on_step: callback after every step.
        on_capture: callback after every captured graph.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with ExitStack() as stack:
        if config.model.fp8 is not None:
            # Otherwise the next model's scales are reduced together with these.
            stack.callback(reset_fp8)
        model = TrainedModel(config, device, ddp_options=ddp_options, model_options=model_options)
        stack.callback(model.close)
        if use_graphs:
            model.attach_graphs(on_capture)
        else:
            model.train_eagerly()
        steps, num_late_captures = _train_steps(model, on_step)
        totals = RankTotals(
            captures_after_first_session=num_late_captures,
        )
        if device.type == "cuda":
            totals.reserved_bytes = torch.cuda.max_memory_reserved(device)
            free, total = torch.cuda.mem_get_info(device)
            totals.gpu_used_bytes = total - free
        model.finish_parameter_gather()
        if model.graphs is not None:
            _add_graphs(totals, model.graphs)
        return TrainingRun(steps=steps, totals=totals, parameters=_parameters(model))


def _train_steps(
    model: TrainedModel, on_step: Callable[[StepRecord], None]
) -> tuple[list[StepRecord], int]:
    """Train all steps; return their records and the number of captures after the first session.

    Captures with more room are not counted.
    """
    has_experts = model.config.moe.num_moe_experts is not None
    records: list[StepRecord] = []
    num_late_captures = 0
    num_steps = len(model.config.train.num_microbatches)
    for step in range(num_steps):
        num_sessions = model.graphs.counters.capture_sessions if model.graphs is not None else 0
        record = model.run_step(step, model.draw(step), announces_next=step + 1 < num_steps)
        if has_experts:
            record = replace(record, expert_metrics=take_expert_metrics())
        if model.graphs is not None and num_sessions > len(model.graphs.counters.recaptures):
            num_late_captures += record.captures
        records.append(record)
        on_step(record)
    return records, num_late_captures


def _add_graphs(totals: RankTotals, graphs: MegatronChunkGraphs) -> None:
    counters = graphs.counters
    totals.slots_per_chunk = graphs.num_slots
    totals.capture_sessions = counters.capture_sessions
    totals.dropped_tokens = sum(graphs.dropped_tokens(wait=True).values())
    totals.overflow_reruns = dict(counters.overflow_reruns)
    totals.recaptures = list(counters.recaptures)
    totals.missing_banks = dict(counters.missing_banks)
    totals.replays_of_bank = graphs.replays_of_bank
    if graphs.engine.report is not None:
        totals.num_graphs = graphs.engine.report.num_graphs
        totals.memsets_kept = graphs.engine.report.memsets_kept
    if graphs.stash is not None and graphs.stash.size is not None:
        totals.stash_bytes = graphs.stash.size.device_bytes
        totals.bytes_without_stash = graphs.stash.full_bytes()


def _parameters(model: TrainedModel) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": parameter.detach().to("cpu", copy=True)
        for index, chunk in enumerate(model.chunks)
        for name, parameter in (*chunk.named_parameters(), *chunk.named_buffers())
    }
