"""Train with chunk graphs and, for comparison, eagerly: the same steps from the same seed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.engine.options import OnCapture
from chunkgraph.engine.verify import same_bits
from chunkgraph.megatron.core.access import versions
from chunkgraph.megatron.features.experts.capacity import factor_for_all
from chunkgraph.megatron.features.experts.rank_budget import rank_factor_for_all
from chunkgraph.megatron.rules.experts import uses_dropless
from chunkgraph.settings import Config
from chunkgraph.settings.words import facts_of
from chunkgraph.trainer.loop import RankTotals, TrainingRun, run_training
from chunkgraph.trainer.results import RunResults, StepResult
from chunkgraph.trainer.trained_model import StepRecord

__all__ = ["Comparison", "compare_runs", "run_eager", "same_bits", "train"]

OnStep = Callable[[str, StepRecord], None]
"""A callback with ``eager`` or ``chunk`` and the step's record."""


@dataclass(frozen=True)
class Comparison:
    """Two runs of one rank, to the last bit.

    Attributes:
        losses: True for each step whose loss is equal.
        grad_norms: True for each step whose gradient norm is equal.
        different_parameters: names of parameters that differ after the run.
        num_parameters: number of compared elements.
        expert_metrics: True for each step whose metrics of the experts are equal on this rank.
    """

    losses: tuple[bool, ...]
    grad_norms: tuple[bool, ...]
    different_parameters: tuple[str, ...]
    num_parameters: int
    expert_metrics: tuple[bool, ...] = ()


@dataclass(frozen=True)
class _RankRun:
    """A rank's run without its parameters, for gathering."""

    steps: Sequence[StepRecord]
    totals: RankTotals
    comparison: Comparison | None


def train(
    config: Config,
    device: torch.device,
    *,
    ddp_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    on_step: OnStep = lambda *_: None,
    on_capture: OnCapture | None = None,
    eager: TrainingRun | None = None,
) -> RunResults:
    """Run ``config`` on this rank, and compare with an eager run if ``train.compare`` is ``eager``.

    Args:
        config: the run.
        device: this rank's device; process groups must be initialized.
        ddp_options: more fields of Megatron's DistributedDataParallelConfig.
        model_options: more arguments of `build_model`.
        on_step: callback after every step of either run.
        on_capture: callback after every captured graph of this rank.
        eager: an eager run of the same steps by `run_eager`; None to run it here.

    Returns:
        The whole job's results, the same on every rank.
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
    ranks = _gather(_RankRun(chunk.steps, chunk.totals, comparison))
    return _results(chunk, eager, ranks)


def run_eager(
    config: Config,
    device: torch.device,
    *,
    ddp_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    on_step: OnStep = lambda *_: None,
) -> TrainingRun:
    """Run ``config`` without graphs, for comparison, and free its model.

    Args:
        config: the run.
        device: this rank's device.
        ddp_options: see `train`.
        model_options: see `train`.
        on_step: callback after every step.
    """
    run = run_training(
        # The oracle is Megatron's own schedule.
        _with_room_for_all(config).replace(pipeline={"schedule": "auto"}),
        device,
        use_graphs=False,
        ddp_options=ddp_options,
        model_options=model_options,
        on_step=lambda record: on_step("eager", record),
    )
    _forget_model(device)
    return run


def _with_room_for_all(config: Config) -> Config:
    """Give experts room for all tokens, to compare with a run that drops none.

    Rows without a token add zeros to the gradients. If a matrix product sums more rows in another
    order, the two runs differ in the last bits.
    """
    moe = config.moe
    if moe.num_moe_experts is None or moe.token_drops != "rerun":
        return config
    if uses_dropless(facts_of(config)):  # all tokens have room
        return config
    if moe.moe_token_dispatcher_type == "flex":
        ranks = config.pipeline.expert_model_parallel_size
        factor = rank_factor_for_all(moe.num_moe_experts, moe.moe_router_topk, ranks)
        return config.replace(moe={"moe_expert_rank_capacity_factor": factor})
    factor = factor_for_all(moe.num_moe_experts, moe.moe_router_topk)
    return config.replace(moe={"moe_expert_capacity_factor": factor})


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
    """Return the nonzero metrics in hexadecimal, to the last bit."""
    return {name: [v.hex() for v in values] for name, values in metrics.items() if any(values)}


def _forget_model(device: torch.device) -> None:
    """Collect the cycles of modules and hooks, to free their memory for the next run."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _gather(run: _RankRun) -> list[_RankRun]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [run]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, run)
    return ranks


def _results(
    chunk: TrainingRun, eager: TrainingRun | None, ranks: Sequence[_RankRun]
) -> RunResults:
    comparisons = [rank.comparison for rank in ranks if rank.comparison is not None]
    are_equal = not any(comparison.different_parameters for comparison in comparisons)
    return RunResults(
        versions=versions(),
        steps=[
            _step(record, eager.steps[index] if eager is not None else None, ranks)
            for index, record in enumerate(chunk.steps)
        ],
        parameters_equal=are_equal if comparisons else None,
        different_parameters={
            f"rank {rank}": list(comparison.different_parameters)
            for rank, comparison in enumerate(comparisons)
            if comparison.different_parameters
        },
        num_parameters_compared=sum(comparison.num_parameters for comparison in comparisons),
        **RankTotals.combined([rank.totals for rank in ranks]),
    )


def _step(record: StepRecord, eager: StepRecord | None, ranks: Sequence[_RankRun]) -> StepResult:
    index = record.step
    comparisons = [rank.comparison for rank in ranks if rank.comparison is not None]
    result = StepResult(
        step=record.step,
        num_microbatches=record.num_microbatches,
        loss_chunk=record.loss,
        grad_norm_chunk=record.grad_norm,
        loss_chunk_hex=record.loss.hex(),
        grad_norm_chunk_hex=record.grad_norm.hex(),
        expert_metrics=_summed([rank.steps[index].expert_metrics for rank in ranks]),
        context_sizes=[rank.steps[index].context_sizes for rank in ranks],
        captures=record.captures,
        replays=record.replays,
        fallbacks=record.fallbacks,
        step_ms_chunk=record.step_ms,
    )
    if eager is None:
        return result
    return replace(
        result,
        loss_eager=eager.loss,
        grad_norm_eager=eager.grad_norm,
        loss_eager_hex=eager.loss.hex(),
        grad_norm_eager_hex=eager.grad_norm.hex(),
        loss_equal=all(comparison.losses[index] for comparison in comparisons),
        grad_norm_equal=all(comparison.grad_norms[index] for comparison in comparisons),
        expert_metrics_equal=all(comparison.expert_metrics[index] for comparison in comparisons),
        step_ms_eager=eager.step_ms,
    )


def _summed(metrics: Sequence[Mapping[str, tuple[float, ...]]]) -> dict[str, float]:
    """Sum each metric over all layers, microbatches and ranks."""
    names = dict.fromkeys(name for of_rank in metrics for name in of_rank)
    return {name: sum(sum(of_rank.get(name, ())) for of_rank in metrics) for name in names}
