"""Train with chunk graphs and, for comparison, eagerly: the same steps from the same seed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.engine.options import OnCapture
from chunkgraph.engine.verify import same_bits
from chunkgraph.megatron.core.access import versions
from chunkgraph.megatron.features.experts.capacity import factor_for_all
from chunkgraph.megatron.features.experts.rank_budget import rank_factor_for_all
from chunkgraph.settings import Config
from chunkgraph.trainer.loop import StepRecord, TrainingRun, run_training

__all__ = ["Comparison", "compare_runs", "run_eager", "same_bits", "train"]

OnStep = Callable[[str, StepRecord], None]
"""Called with ``eager`` or ``chunk`` and the step's record."""


@dataclass(frozen=True)
class Comparison:
    """Two runs of one rank, to the last bit.

    Attributes:
        losses: whether each step's loss is equal.
        grad_norms: whether each step's gradient norm is equal.
        different_parameters: names of parameters that differ after the run.
        num_parameters: elements compared.
        expert_metrics: whether each step's metrics of the experts are equal on this rank.
    """

    losses: tuple[bool, ...]
    grad_norms: tuple[bool, ...]
    different_parameters: tuple[str, ...]
    num_parameters: int
    expert_metrics: tuple[bool, ...] = ()


def train(
    config: Config,
    device: torch.device,
    *,
    ddp_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    on_step: OnStep = lambda *_: None,
    on_capture: OnCapture | None = None,
    eager: TrainingRun | None = None,
) -> dict[str, Any]:
    """Run ``config`` on this rank, with its eager twin where ``train.compare`` is ``eager``.

    Args:
        config: the run.
        device: this rank's device; process groups must be set up.
        ddp_options: further fields of Megatron's DistributedDataParallelConfig.
        model_options: further arguments of `build_model`.
        on_step: called after every step of either run.
        on_capture: called after every captured graph of this rank.
        eager: the twin, where `run_eager` has been through the same steps already.

    Returns:
        The whole job's results as plain values for JSON, the same on every rank.
    """
    if config.train.compare != "eager":
        eager = None
    elif eager is None:
        eager = run_eager(
            config, device, ddp_options=ddp_options, model_options=model_options, on_step=on_step
        )
    chunk = run_training(
        config,
        device,
        use_graphs=config.capture.enabled,
        ddp_options=ddp_options,
        model_options=model_options,
        on_step=lambda record: on_step("chunk", record),
        on_capture=on_capture,
    )
    comparison = compare_runs(eager, chunk) if eager is not None else None
    return _report(chunk, eager, _gather(_of_rank(chunk, comparison)))


def run_eager(
    config: Config,
    device: torch.device,
    *,
    ddp_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    on_step: OnStep = lambda *_: None,
) -> TrainingRun:
    """What `train` compares with: ``config`` without graphs, and nothing left of its model.

    Args:
        config: the run.
        device: this rank's device.
        ddp_options: as of `train`.
        model_options: as of `train`.
        on_step: called after every step.
    """
    run = run_training(
        _with_room_for_all(config),
        device,
        use_graphs=False,
        ddp_options=ddp_options,
        model_options=model_options,
        on_step=lambda record: on_step("eager", record),
    )
    _forget_model(device)
    return run


def _with_room_for_all(config: Config) -> Config:
    """What a run that drops no token is compared with: one whose experts have room from the start.

    Rows without a token add zeros to the gradients; where a matrix product adds up more rows in
    another order, the two differ in the last bits.
    """
    moe = config.moe
    if moe.num_moe_experts is None or moe.token_drops != "rerun":
        return config
    if moe.moe_token_dispatcher_type == "flex":
        ranks = config.pipeline.expert_model_parallel_size
        enough = rank_factor_for_all(moe.num_moe_experts, moe.moe_router_topk, ranks)
        return replace(config, moe=replace(moe, moe_expert_rank_capacity_factor=enough))
    enough = factor_for_all(moe.num_moe_experts, moe.moe_router_topk)
    return replace(config, moe=replace(moe, moe_expert_capacity_factor=enough))


def compare_runs(eager: TrainingRun, chunk: TrainingRun) -> Comparison:
    """Compare two runs of the same steps on this rank, bit for bit."""
    assert eager.parameters.keys() == chunk.parameters.keys()
    pairs = list(zip(eager.steps, chunk.steps, strict=True))
    return Comparison(
        losses=tuple(a.loss.hex() == b.loss.hex() for a, b in pairs),
        grad_norms=tuple(a.grad_norm.hex() == b.grad_norm.hex() for a, b in pairs),
        different_parameters=tuple(
            name
            for name, value in eager.parameters.items()
            if not same_bits(value, chunk.parameters[name])
        ),
        num_parameters=sum(value.numel() for value in eager.parameters.values()),
        expert_metrics=tuple(_hex(a.expert_metrics) == _hex(b.expert_metrics) for a, b in pairs),
    )


def _hex(metrics: Mapping[str, tuple[float, ...]]) -> dict[str, list[str]]:
    """To the last bit, and by the metrics that recorded something."""
    return {name: [v.hex() for v in values] for name, values in metrics.items() if any(values)}


def _forget_model(device: torch.device) -> None:
    """Modules and hooks form cycles; collect them so that the second run has the memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _of_rank(chunk: TrainingRun, comparison: Comparison | None) -> dict[str, Any]:
    return {
        "num_slots": list(chunk.num_slots),
        "num_graphs": chunk.num_graphs,
        "captures_after_first_session": chunk.captures_after_first_session,
        "comparison": comparison,
        "dropped_tokens": chunk.dropped_tokens,
        "overflow_reruns": chunk.overflow_reruns,
        "recaptures": list(chunk.recaptures),
        "stash_bytes": chunk.stash_bytes,
        "bytes_without_stash": chunk.bytes_without_stash,
        "expert_metrics": [record.expert_metrics for record in chunk.steps],
        "context_sizes": [record.context_sizes for record in chunk.steps],
        "replays_of_bank": chunk.replays_of_bank,
        "missing_banks": chunk.missing_banks,
        "memsets_kept": chunk.memsets_kept,
        "reserved_bytes": chunk.reserved_bytes,
        "gpu_used_bytes": chunk.gpu_used_bytes,
    }


def _gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def _report(
    chunk: TrainingRun, eager: TrainingRun | None, ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    comparisons: list[Comparison] = [r["comparison"] for r in ranks if r["comparison"] is not None]
    compared = bool(comparisons)
    return {
        "versions": versions(),
        "steps": [
            _step(index, record, eager, comparisons, ranks)
            for index, record in enumerate(chunk.steps)
        ],
        "parameters_equal": (
            not any(c.different_parameters for c in comparisons) if compared else None
        ),
        "different_parameters": {
            f"rank {rank}": list(c.different_parameters)
            for rank, c in enumerate(comparisons)
            if c.different_parameters
        },
        "num_parameters_compared": sum(c.num_parameters for c in comparisons),
        "capture_sessions": chunk.capture_sessions,
        "captures_after_first_session": max(r["captures_after_first_session"] for r in ranks),
        "slots_per_chunk": [r["num_slots"] for r in ranks],
        "num_graphs": sum(r["num_graphs"] for r in ranks),
        "dropped_tokens": sum(r["dropped_tokens"] for r in ranks),
        "overflow_reruns": ranks[0]["overflow_reruns"],
        "recaptures": ranks[0]["recaptures"],
        "stash_bytes": [r["stash_bytes"] for r in ranks],
        "bytes_without_stash": [r["bytes_without_stash"] for r in ranks],
        "replays_of_bank": [r["replays_of_bank"] for r in ranks],
        "missing_banks": [r["missing_banks"] for r in ranks],
        "memsets_kept": [r["memsets_kept"] for r in ranks],
        "reserved_bytes": [r["reserved_bytes"] for r in ranks],
        "gpu_used_bytes": [r["gpu_used_bytes"] for r in ranks],
    }


def _step(
    index: int,
    record: StepRecord,
    eager: TrainingRun | None,
    comparisons: list[Comparison],
    ranks: list[dict[str, Any]],
) -> dict[str, Any]:
    twin = eager.steps[index] if eager is not None else None
    return {
        "step": record.step,
        "num_microbatches": record.num_microbatches,
        "loss_chunk": record.loss,
        "loss_eager": twin.loss if twin else None,
        "grad_norm_chunk": record.grad_norm,
        "grad_norm_eager": twin.grad_norm if twin else None,
        "loss_chunk_hex": record.loss.hex(),
        "loss_eager_hex": twin.loss.hex() if twin else None,
        "grad_norm_chunk_hex": record.grad_norm.hex(),
        "grad_norm_eager_hex": twin.grad_norm.hex() if twin else None,
        "loss_equal": all(c.losses[index] for c in comparisons) if twin else None,
        "grad_norm_equal": all(c.grad_norms[index] for c in comparisons) if twin else None,
        "expert_metrics": _summed([r["expert_metrics"][index] for r in ranks]),
        "expert_metrics_equal": all(c.expert_metrics[index] for c in comparisons) if twin else None,
        "context_sizes": [r["context_sizes"][index] for r in ranks],
        "captures": record.captures,
        "replays": record.replays,
        "fallbacks": record.fallbacks,
        "step_ms_chunk": record.step_ms,
        "step_ms_eager": twin.step_ms if twin else None,
    }


def _summed(metrics: list[dict[str, tuple[float, ...]]]) -> dict[str, float]:
    """Each metric over all layers, microbatches and ranks."""
    names = dict.fromkeys(name for of_rank in metrics for name in of_rank)
    return {name: sum(sum(of_rank.get(name, ())) for of_rank in metrics) for name in names}
