"""Train with chunk graphs and, for comparison, eagerly: the same steps from the same seed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.engine.bits import same_bits
from chunkgraph.megatron.core.access import versions
from chunkgraph.megatron.features.experts.feature import dropped_tokens
from chunkgraph.megatron.features.experts.room import factor_for_all
from chunkgraph.megatron.features.fp8 import reset_fp8
from chunkgraph.megatron.features.stash import ExpertStash
from chunkgraph.megatron.rules.experts import uses_dropless
from chunkgraph.settings import Config
from chunkgraph.settings.words import facts_of
from chunkgraph.trainer.results import COMPARED, RunResults, StepRecord, StepResult
from chunkgraph.trainer.trained_model import TrainedModel

_OF_ALL_RANKS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("capture_sessions", "overflow_reruns", "recaptures"), itemgetter(0)),
    **dict.fromkeys(("num_graphs", "dropped_tokens"), sum),
    "captures_after_first_session": max,
}
"""How the results combine totals of the ranks; they hold the others for each rank."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run of all steps on this rank.

    Attributes:
        steps: one record for each step.
        totals: this rank's values of the fields of `RunResults` that are not about single steps.
        parameters: final parameters and buffers on the CPU, named ``chunk index.name``.
    """

    steps: Sequence[StepRecord]
    totals: Mapping[str, Any]
    parameters: Mapping[str, torch.Tensor]


def run_training(
    config: Config,
    device: torch.device,
    *,
    use_graphs: bool,
    on_step: Callable[[StepRecord], None] = lambda _: None,
    **model_options: Any,
) -> TrainingRun:
    """Build the model from the seed, train every step of ``config``, and free the model.

    Args:
        config: the run.
        device: this rank's device; process groups must be initialized.
        use_graphs: whether to attach chunk graphs.
        on_step: callback after every step.
        model_options: more arguments of `build_model`.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with ExitStack() as stack:
        if config.model.fp8 is not None:
            # Otherwise the next model's scales are reduced together with these.
            stack.callback(reset_fp8)
        model = TrainedModel(config, device, **model_options)
        stack.callback(model.close)
        if use_graphs:
            model.attach_graphs()
        else:
            model.train_eagerly()
        steps: list[StepRecord] = []
        num_late_captures = 0
        num_steps = len(config.train.num_microbatches)
        for step in range(num_steps):
            num_sessions = model.counters.capture_sessions
            record = model.run_step(step, model.draw(step), announces_next=step + 1 < num_steps)
            if num_sessions > len(model.counters.recaptures):
                num_late_captures += record.captures
            steps.append(record)
            on_step(record)
        totals = {**_totals(model), "captures_after_first_session": num_late_captures}
        model.finish_parameter_gather()
        parameters = {
            f"{index}.{name}": value.detach().to("cpu", copy=True)
            for index, chunk in enumerate(model.chunks)
            for name, value in (*chunk.named_parameters(), *chunk.named_buffers())
        }
        return TrainingRun(steps=steps, totals=totals, parameters=parameters)


def _totals(model: TrainedModel) -> dict[str, Any]:
    counters, graphs = model.counters, model.graphs
    report = graphs and graphs.engine.report
    stash = graphs and graphs.find(ExpertStash)
    is_gpu = model.device.type == "cuda"
    return {
        "capture_sessions": counters.capture_sessions,
        "overflow_reruns": dict(counters.overflow_reruns),
        "recaptures": list(counters.recaptures),
        "missing_banks": dict(counters.missing_banks),
        "slots_per_chunk": report.num_slots if report else graphs.num_slots if graphs else (),
        "replays_of_bank": graphs.replays_of_bank if graphs else {},
        "dropped_tokens": sum(dropped_tokens(graphs, wait=True).values()) if graphs else 0,
        "num_graphs": report.num_graphs if report else 0,
        "stash_bytes": stash.num_bytes() if stash else 0,
        "bytes_without_stash": stash.full_bytes() if stash else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved(model.device) if is_gpu else 0,
    }


def run_eager(
    config: Config,
    device: torch.device,
    *,
    on_step: Callable[[StepRecord], None] = lambda _: None,
    **model_options: Any,
) -> TrainingRun:
    """Run ``config`` without graphs, by Megatron's own schedule; see `run_training`."""
    run = run_training(
        _with_room_for_all(config.replace(pipeline={"schedule": "auto"})),
        device,
        use_graphs=False,
        on_step=on_step,
        **model_options,
    )
    gc.collect()  # cycles of modules and hooks, to free their memory for the next run
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return run


def _with_room_for_all(config: Config) -> Config:
    """Give experts room for all tokens, to compare with a run that drops none.

    Rows without a token add zeros to the gradients. If a matrix product sums more rows in another
    order, the two runs differ in the last bits.
    """
    moe = config.moe
    if moe.token_drops != "rerun" or uses_dropless(facts_of(config)) or not moe.num_moe_experts:
        return config
    factor = factor_for_all(moe.num_moe_experts, moe.moe_router_topk)
    return config.replace(moe={"moe_expert_capacity_factor": factor})


def train(
    config: Config,
    device: torch.device,
    *,
    on_step: Callable[[str, StepRecord], None] = lambda *_: None,
    eager: TrainingRun | None = None,
    **model_options: Any,
) -> RunResults:
    """Run ``config`` on this rank, and compare with an eager run if ``train.compare`` is ``eager``.

    Args, in addition to those of `run_training`:
        on_step: callback after every step, with ``eager`` or ``chunk``.
        eager: an eager run of the same steps by `run_eager`; None to run it here.

    Returns:
        The whole job's results, the same on every rank.
    """
    if config.train.compare != "eager":
        eager = None
    elif eager is None:
        eager = run_eager(config, device, on_step=partial(on_step, "eager"), **model_options)
    chunk = run_training(
        config,
        device,
        use_graphs=config.capture.enabled,
        on_step=partial(on_step, "chunk"),
        **model_options,
    )
    expected = {} if eager is None else eager.parameters
    own = (
        chunk.totals,
        chunk.steps,
        [] if eager is None else eager.steps,
        [name for name, v in expected.items() if not same_bits(v, chunk.parameters[name])],
        sum(value.numel() for value in expected.values()),
    )
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    totals, chunks, eagers, different, num_compared = zip(*ranks, strict=True)
    of_each = {name: [of_rank[name] for of_rank in totals] for name in chunk.totals}
    return RunResults(
        versions=versions(),
        steps=[
            _step([steps[i] for steps in chunks], [steps[i] for steps in eagers if steps])
            for i in range(len(chunk.steps))
        ],
        different_parameters={f"rank {i}": names for i, names in enumerate(different) if names},
        num_parameters_compared=sum(num_compared),
        **{name: _OF_ALL_RANKS.get(name, list)(values) for name, values in of_each.items()},
    )


def _step(chunk: Sequence[StepRecord], eager: Sequence[StepRecord]) -> StepResult:
    """Return a step's results from the records of all ranks; ``eager`` may be empty."""
    result = StepResult(**vars(_of_all_ranks(chunk)))
    if not eager:
        return result
    different = [
        name
        for name in COMPARED
        # The representation is exact to the last bit, and that of NaN equals itself.
        if [repr(getattr(r, name)) for r in eager] != [repr(getattr(r, name)) for r in chunk]
    ]
    return replace(result, eager=_of_all_ranks(eager), different=different)


def _of_all_ranks(records: Sequence[StepRecord]) -> StepRecord:
    """Return the first rank's record with the metrics and context-parallel sizes of all."""
    metrics: Counter[str] = Counter()
    for record in records:
        metrics.update(record.expert_metrics)
    sizes = [size for record in records for size in record.context_sizes]
    return replace(records[0], expert_metrics=dict(metrics), context_sizes=sizes)
