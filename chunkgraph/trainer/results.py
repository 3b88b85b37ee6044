"""Hold the results of a training run, and check them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chunkgraph.settings import Config

__all__ = ["RunResults", "StepResult", "find_failures"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one step; values of the eager run are None without one.

    Attributes:
        step: number of the step, from 0.
        num_microbatches: number of microbatches of each data-parallel rank.
        loss_chunk: mean loss of the run with captured chunks.
        loss_eager: mean loss of the eager run.
        grad_norm_chunk: gradient norm before clipping, with captured chunks.
        grad_norm_eager: gradient norm before clipping, eager.
        loss_equal: True if the losses agree to the last bit, on all ranks.
        grad_norm_equal: True if the gradient norms agree to the last bit, on all ranks.
        expert_metrics: each metric of the experts over all layers, microbatches and ranks.
        expert_metrics_equal: True if these metrics agree to the last bit, on all ranks.
        context_sizes: context-parallel size of each microbatch, for each rank, if sizes differ.
        captures: number of slots captured in this step, on rank 0.
        replays: number of forwards replayed in this step, on rank 0.
        fallbacks: reasons for which the step ran eagerly, each with the number of steps.
        step_ms_chunk: time of the step with captured chunks, in ms.
        step_ms_eager: time of the eager step, in ms.
    """

    step: int
    num_microbatches: int
    loss_chunk: float
    loss_eager: float | None = None
    grad_norm_chunk: float
    grad_norm_eager: float | None = None
    loss_equal: bool | None = None
    grad_norm_equal: bool | None = None
    expert_metrics: Mapping[str, float] = field(default_factory=dict)
    expert_metrics_equal: bool | None = None
    context_sizes: Sequence[Sequence[int]] = ()
    captures: int
    replays: int
    fallbacks: Mapping[str, int]
    step_ms_chunk: float
    step_ms_eager: float | None = None

    @property
    def is_equal(self) -> bool | None:
        """Return whether loss, norm and metrics agree to the last bit; None if not compared."""
        if self.loss_equal is None or self.grad_norm_equal is None:
            return None
        return self.loss_equal and self.grad_norm_equal and self.expert_metrics_equal is not False


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """Results of a whole run of all ranks; the fields are the keys of ``--json``.

    Attributes:
        versions: versions of the relevant packages, by name.
        steps: the steps, in order.
        parameters_equal: True if every parameter agrees to the last bit after the run, on all
            ranks; None if not compared.
        different_parameters: names of the parameters that differ, by rank.
        num_parameters_compared: number of compared elements of all ranks together.
        capture_sessions: number of sessions that captured graphs.
        captures_after_first_session: number of slots captured later, except captures with more
            room; must be 0.
        slots_per_chunk: number of slots of each chunk, for each rank; empty for an eager run.
        num_graphs: number of graphs, forward and backward, of all ranks together.
        dropped_tokens: number of tokens for which an expert had no room, in all steps and ranks
            together.
        overflow_reruns: number of repeated steps, by the feature that had no room.
        recaptures: the reason of each capture with more room.
        stash_bytes: bytes of the stash's pages on the device, for each rank.
        bytes_without_stash: bytes that slots would hold without the stash, for each rank.
        replays_of_bank: number of replayed forwards by bank, for each rank, if there are several
            banks.
        missing_banks: number of eager steps by the bank that has no graphs and why, for each rank.
        memsets_kept: see `CaptureReport`, for each rank.
        reserved_bytes: most memory that torch held on the device, for each rank; 0 on a CPU.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    steps: Sequence[StepResult]
    parameters_equal: bool | None
    different_parameters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    num_parameters_compared: int
    capture_sessions: int
    captures_after_first_session: int
    slots_per_chunk: Sequence[Sequence[int]]
    num_graphs: int
    dropped_tokens: int = 0
    overflow_reruns: Mapping[str, int] = field(default_factory=dict)
    recaptures: Sequence[str] = ()
    stash_bytes: Sequence[int] = ()
    bytes_without_stash: Sequence[int] = ()
    replays_of_bank: Sequence[Mapping[str, int]] = ()
    missing_banks: Sequence[Mapping[str, int]] = ()
    memsets_kept: Sequence[str] = ()
    reserved_bytes: Sequence[int] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def find_failures(config: Config, results: RunResults) -> list[str]:
    """List the failures of a run, such as values that differ from eager; empty for none."""
    failures: list[str] = []
    for step in results.steps:
        where = f"step {step.step + 1}"
        if not (math.isfinite(step.loss_chunk) and math.isfinite(step.grad_norm_chunk)):
            failures.append(f"{where}: the loss or gradient norm is not a finite number")
        if step.loss_equal is False:
            failures.append(
                f"{where}: the losses differ: "
                f"{step.loss_chunk!r} captured, {step.loss_eager!r} eager"
            )
        if step.grad_norm_equal is False:
            failures.append(
                f"{where}: the gradient norms differ: "
                f"{step.grad_norm_chunk!r} captured, {step.grad_norm_eager!r} eager"
            )
        if step.expert_metrics_equal is False:
            failures.append(f"{where}: the metrics of the experts differ from the eager run's")
    if config.train.compare == "eager" and not results.parameters_equal:
        failures.append("the parameters after the run differ from the eager run's")
    if results.captures_after_first_session:
        failures.append(
            f"{results.captures_after_first_session} slot(s) were captured after the first session"
        )
    return failures
