"""Summarize all ranks' measurements of one variant as plain values for the document."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.bench.measure import Measurement
from chunkgraph.bench.packed_work import packed_summary
from chunkgraph.megatron.core.access import import_megatron, versions
from chunkgraph.schedules import CostModel, megatron_schedule, simulate
from chunkgraph.settings import Config

__all__ = ["gathered_summary"]

_KERNEL_KEYS = (
    *("kernel_share", "kernel_share_by_rank", "kernel_ms_by_rank", "other_kernel_ms_by_rank"),
    *("forward_kernel_ms", "backward_kernel_ms", "ideal_ms", "ideal_pipeline_ms"),
    "num_profiled_fallbacks",
    *("dispatch_ms_by_rank", "stash_ms_by_rank", "send_receive_ms_by_rank"),
    *("graph_launches_by_rank", "kernel_launches_by_rank"),
    *("graph_copies_by_rank", "idle_at_copies_ms_by_rank", "idle_ms_by_rank"),
)


@dataclass(frozen=True)
class _Rank:
    """A rank's measurement and its place in the pipeline."""

    measurement: Measurement
    pipeline_rank: int


def gathered_summary(
    config: Config, device: torch.device, measurement: Measurement
) -> dict[str, Any]:
    """Gather and summarize the measurements, the same on every rank; a collective call."""
    pipeline_rank = dist.get_rank()
    if config.bench.runtime == "megatron":
        state = import_megatron("megatron.core.parallel_state")
        pipeline_rank = state.get_pipeline_model_parallel_rank()
    rank = _Rank(measurement, pipeline_rank)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, rank)
    return {
        "device": _device_name(device),
        "num_gpus": len(ranks) if device.type == "cuda" else 0,
        "versions": _versions(device),
        "is_deterministic": _is_deterministic(config),
        **_steps(config, ranks),
        **_memory(ranks),
        **_captures(config, ranks),
        **_host(ranks),
        **_kernels(config, ranks),
        "costs_ms": _costs(ranks),
        "num_gemms": ranks[-1].measurement.num_gemms or None,
        "optimizer_ms": _optimizer_ms(ranks),
        "matmul_tflops_by_rank": [rank.measurement.matmul_tflops for rank in ranks],
        "parameters_sha256": [rank.measurement.parameters_sha256 for rank in ranks],
    }


def _steps(config: Config, ranks: Sequence[_Rank]) -> dict[str, Any]:
    """Summarize steps; the time of a step is the time of its slowest rank."""
    first = config.bench.num_warmup_steps
    steps = ranks[0].measurement.steps
    times = [
        max(rank.measurement.steps[index].step_ms for rank in ranks) for index in range(len(steps))
    ]
    counts = [step.num_microbatches for step in steps]
    # `ranks` contains all ranks that share the data of each data-parallel rank.
    num_tokens = sum(s.work.num_tokens for rank in ranks for s in rank.measurement.steps[first:])
    num_tokens = num_tokens * config.pipeline.data_parallel_size // len(ranks)
    measured = times[first:]
    captured = [index for index, step in enumerate(steps) if step.captures]
    return {
        "step_ms": statistics.median(measured),
        "step_ms_mean": statistics.fmean(measured),
        "step_ms_min": min(measured),
        "step_ms_max": max(measured),
        "step_ms_all": measured,
        "warmup_step_ms": times[:first],
        "num_microbatches": counts[first:],
        "tokens_per_s": num_tokens / (sum(measured) / 1e3),
        "num_measured_captures": sum(index >= first for index in captured),
        **packed_summary(config, [rank.measurement.steps[first:] for rank in ranks], measured),
        "losses": [step.loss for step in steps],
        "losses_hex": [step.loss.hex() for step in steps],
        "grad_norms_hex": [step.grad_norm.hex() for step in steps],
    }


def _memory(ranks: Sequence[_Rank]) -> dict[str, Any]:
    reserved = [rank.measurement.reserved_bytes for rank in ranks]
    allocated = [rank.measurement.allocated_bytes for rank in ranks]
    return {
        "reserved_bytes": max(reserved),
        "allocated_bytes": max(allocated),
        "reserved_bytes_by_rank": reserved,
        "allocated_bytes_by_rank": allocated,
        "pool_bytes_by_rank": [rank.measurement.captures.pool_bytes for rank in ranks],
    }


def _captures(config: Config, ranks: Sequence[_Rank]) -> dict[str, Any]:
    """Summarize captures; a capture inside a step takes the step's excess over the median."""
    seconds: list[float] = []
    for rank in ranks:
        captures = rank.measurement.captures
        times = [step.step_ms for step in rank.measurement.steps]
        if captures.duration_s is not None:
            seconds.append(captures.duration_s)
        elif captures.step is not None and captures.step < len(times):
            median_ms = statistics.median(times[config.bench.num_warmup_steps :])
            seconds.append(max(0.0, times[captures.step] - median_ms) / 1e3)
    return {
        "capture_s": max(seconds) if seconds else None,
        "num_captures_after_first": max(
            rank.measurement.captures.num_after_first for rank in ranks
        ),
        # The same on all ranks.
        "overflow_reruns": ranks[0].measurement.captures.overflow_reruns,
    }


def _host(ranks: Sequence[_Rank]) -> dict[str, Any]:
    """Return the largest median over ranks, for each kind of host time."""
    by_rank = [r.measurement.host.medians() for r in ranks if r.measurement.host is not None]
    keys = (
        *("host_us_forward", "host_us_backward"),
        *("host_us_forward_without_launch", "host_us_backward_without_launch"),
    )
    largest: dict[str, Any] = {}
    for key in keys:
        values = [value for medians in by_rank if (value := medians[key]) is not None]
        largest[key] = max(values) if values else None
    return largest


def _costs(ranks: Sequence[_Rank]) -> dict[str, float] | None:
    """Return the graph times of the slowest chunk among those with the most graphs."""
    chunks = [costs for rank in ranks for costs in rank.measurement.chunk_costs]
    return max(chunks, key=lambda costs: (len(costs), sum(costs.values())), default=None)


def _optimizer_ms(ranks: Sequence[_Rank]) -> float | None:
    """Return the time of the slowest rank."""
    times = (rank.measurement.optimizer_ms for rank in ranks)
    return max((ms for ms in times if ms is not None), default=None)


def _kernels(config: Config, ranks: Sequence[_Rank]) -> dict[str, Any]:
    """Summarize kernel times per step; ``trace`` defines them."""
    empty = dict.fromkeys(_KERNEL_KEYS)
    kernels = [r.measurement.kernels for r in ranks if r.measurement.kernels is not None]
    if len(kernels) < len(ranks):
        return empty
    num_steps = ranks[0].measurement.num_profiled_steps
    shares = [one.kernel_share for one in kernels]
    measured = [share for share in shares if share is not None]
    forward, backward = _stage_costs(config, ranks)
    other = [one.other / num_steps for one in kernels]
    pipeline = _pipeline_ms(config, forward, backward)
    return {
        **empty,
        "kernel_share": min(measured) if measured else None,
        "kernel_share_by_rank": shares,
        "kernel_ms_by_rank": [one.total / num_steps for one in kernels],
        "other_kernel_ms_by_rank": other,
        "dispatch_ms_by_rank": [one.dispatch / num_steps for one in kernels],
        "stash_ms_by_rank": [one.stash / num_steps for one in kernels],
        "send_receive_ms_by_rank": [one.send_receive / num_steps for one in kernels],
        "forward_kernel_ms": forward,
        "backward_kernel_ms": backward,
        "ideal_ms": None if pipeline is None else pipeline + max(other),
        "ideal_pipeline_ms": pipeline,
        "num_profiled_fallbacks": ranks[0].measurement.num_profiled_fallbacks,
        "graph_launches_by_rank": [one.num_graph_launches / num_steps for one in kernels],
        "kernel_launches_by_rank": [one.num_kernel_launches / num_steps for one in kernels],
        "graph_copies_by_rank": [one.num_graph_copies / num_steps for one in kernels],
        "idle_at_copies_ms_by_rank": [one.idle_at_copies / num_steps for one in kernels],
        "idle_ms_by_rank": [
            {place: ms / num_steps for place, ms in one.idle.items()} for one in kernels
        ],
    }


def _stage_costs(
    config: Config, ranks: Sequence[_Rank]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return a microbatch's kernel ms by stage, forward and backward, on the slowest ranks."""
    pipeline = config.pipeline
    forward: dict[int, float] = {}
    backward: dict[int, float] = {}
    for rank in ranks:
        measurement = rank.measurement
        assert measurement.kernels is not None
        # The profiled steps are the last ones.
        num_microbatches = _profiled_microbatches(config, measurement)
        for target, times in (
            (forward, measurement.kernels.forward),
            (backward, measurement.kernels.backward),
        ):
            for chunk, ms in times.items():
                stage = chunk * pipeline.pipeline_model_parallel_size + rank.pipeline_rank
                target[stage] = max(target.get(stage, 0.0), ms / num_microbatches)
    return forward, backward


def _profiled_microbatches(config: Config, measurement: Measurement) -> int:
    counts = config.train.num_microbatches
    end = measurement.num_steps_run
    return sum(
        counts[step % len(counts)] for step in range(end - measurement.num_profiled_steps, end)
    )


def _pipeline_ms(
    config: Config, forward: dict[int, float], backward: dict[int, float]
) -> float | None:
    """Simulate the pipeline, in which only kernels take time.

    Returns:
        The time of a step; None if a stage has no times, microbatch counts change, or the run
        names a schedule, which may split backwards: profiles do not separate the halves.
    """
    pipeline, counts = config.pipeline, config.train.num_microbatches
    stages = range(pipeline.pipeline_model_parallel_size * pipeline.num_model_chunks)
    if len(set(counts)) != 1 or not all(forward.get(s) and backward.get(s) for s in stages):
        return None
    if pipeline.schedule != "auto":
        return None
    schedule = megatron_schedule(
        pipeline.pipeline_model_parallel_size,
        pipeline.num_model_chunks,
        counts[0],
        pipeline.microbatch_group_size_per_vp_stage,
    )
    costs = {s: CostModel(forward_ms=forward[s], backward_ms=backward[s]) for s in stages}
    return simulate(schedule, costs).makespan_ms


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _is_deterministic(config: Config) -> bool:
    """Return whether torch's and Transformer Engine's kernels are deterministic."""
    allowed = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    return config.train.deterministic and allowed == "0"


def _versions(device: torch.device) -> dict[str, str]:
    numbers = versions()
    if device.type == "cuda":
        numbers["cuda"] = str(torch.version.cuda)
        numbers["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return numbers
