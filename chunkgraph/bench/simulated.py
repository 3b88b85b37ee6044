"""Simulate steps of several schedules and pipeline sizes with the measured times of graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from chunkgraph.errors import TopologyError
from chunkgraph.schedules import (
    CostModel,
    build_schedule,
    get_family,
    list_schedules,
    simulate,
)
from chunkgraph.settings import Config

__all__ = ["PIPELINE_SIZES", "merged_costs", "simulated_steps"]

PIPELINE_SIZES = (2, 4, 8)
_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "interleaved-zb")


def merged_costs(variants: Iterable[Mapping[str, float] | None]) -> dict[str, float]:
    """Merge the times of variants; the first variant with a time counts."""
    merged: dict[str, float] = {}
    for costs in variants:
        merged = {**(costs or {}), **merged}
    return {name: merged[name] for name in "FBIW" if name in merged}


def simulated_steps(
    costs: Mapping[str, float], config: Config, optimizer_ms: float = 0.0
) -> dict[str, dict[str, float]]:
    """Return the ms of a step by schedule and pipeline size.

    Each rank has as many layers as a rank of the run, and steps its optimizer in ``optimizer_ms``.
    Embedding, loss and messages are not simulated. Schedules that split backwards need I and W.
    Sizes that a schedule cannot run with the run's largest number of microbatches are omitted.
    """
    if "F" not in costs or not ("B" in costs or {"I", "W"} <= costs.keys()):
        return {}
    has_halves = {"I", "W"} <= costs.keys()
    steps: dict[str, dict[str, float]] = {}
    for name in list_schedules() if config.bench.runtime == "torch" else _SCHEDULES:
        family = get_family(name)
        if family.splits_backward and not has_halves:
            continue
        steps[name] = {}
        num_chunks = family.num_chunks or max(2, config.pipeline.num_model_chunks)
        # A chunk whose backward is split has no other graph for a whole one.
        whole = {"B": costs["I"] + costs["W"]} if family.splits_backward else {}
        scaled = _cost_model({**costs, **whole}).scaled(
            config.pipeline.num_model_chunks / num_chunks
        )
        for size in PIPELINE_SIZES:
            with suppress(TopologyError):
                pipeline_ms = _simulated_step_ms(
                    name, scaled, size, num_chunks, max(config.train.num_microbatches)
                )
                steps[name][str(size)] = pipeline_ms + optimizer_ms
    return steps


def _cost_model(costs: Mapping[str, float]) -> CostModel:
    """Return the costs of a chunk from the ms of F, and of B or of both I and W."""
    halves = {"input_grad_ms": costs.get("I"), "weight_grad_ms": costs.get("W")}
    return CostModel(
        forward_ms=costs["F"],
        backward_ms=costs.get("B") or costs["I"] + costs["W"],
        **{name: ms for name, ms in halves.items() if ms is not None},
    )


def _simulated_step_ms(
    name: str, costs: CostModel, num_ranks: int, num_chunks: int, num_microbatches: int
) -> float:
    """Return the ms of a step of a schedule family.

    Raises:
        TopologyError: The schedule cannot run these sizes.
    """
    schedule = build_schedule(
        name, num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=num_microbatches
    )
    return simulate(schedule, costs).makespan_ms
