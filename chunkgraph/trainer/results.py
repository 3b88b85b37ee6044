"""Hold the results of a training run, and check them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chunkgraph._text import counted

COMPARED = {
    "loss": "the losses",
    "grad_norm": "the gradient norms",
    "expert_metrics": "the metrics of the experts",
}
"""The fields of a step that are compared with the eager run, and what messages call them."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Results of one training step of this rank.

    Attributes:
        step: number of the step, from 0.
        num_microbatches: number of microbatches of each data-parallel rank.
        loss: mean over microbatches and data-parallel ranks, the same on every rank.
        grad_norm: gradient norm before clipping, over all stages.
        step_ms: wall time of schedule and optimizer, in ms.
        captures: number of slots captured in the step.
        replays: number of replayed forward graphs.
        fallbacks: mapping from the reason of an eager step to 1.
        expert_metrics: sum over the step and its layers of each metric of the experts that is not
            zero, by name.
        context_sizes: context-parallel size of each microbatch, if sizes differ, for each rank.
    """

    step: int
    num_microbatches: int
    loss: float
    grad_norm: float
    step_ms: float
    captures: int = 0
    replays: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    expert_metrics: Mapping[str, float] = field(default_factory=dict)
    context_sizes: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, kw_only=True)
class StepResult(StepRecord):
    """Results of one step with captured chunks: rank 0's, with metrics and sizes of all ranks.

    Attributes:
        eager: the same of the eager run; None without one.
        different: the fields that differ from the eager run's in any bit, on any rank, among
            ``loss``, ``grad_norm`` and ``expert_metrics``; None without an eager run.
    """

    eager: StepRecord | None = None
    different: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """Results of a whole run of all ranks; the fields are the keys of ``--json``.

    Attributes:
        versions: versions of the relevant packages, by name.
        steps: the steps, in order.
        different_parameters: names of the parameters that differ from the eager run's in any bit
            after the run, by rank.
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
        reserved_bytes: most memory that torch held on the device, for each rank; 0 on a CPU.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    steps: Sequence[StepResult]
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
    reserved_bytes: Sequence[int] = ()


def find_failures(results: RunResults) -> list[str]:
    """List the failures of a run, such as values that differ from eager; empty for none."""
    failures: list[str] = []
    for step in results.steps:
        where = f"step {step.step + 1}"
        if not (math.isfinite(step.loss) and math.isfinite(step.grad_norm)):
            failures.append(f"{where}: the loss or gradient norm is not a finite number")
        failures += [
            f"{where}: {COMPARED[name]} differ: "
            f"{getattr(step, name)!r} captured, {getattr(step.eager, name)!r} eager"
            for name in step.different or ()
        ]
    if results.different_parameters:
        failures.append("the parameters after the run differ from the eager run's")
    if results.captures_after_first_session:
        count = results.captures_after_first_session
        failures.append(f"captured after the first session: {counted(count, 'slot')}")
    return failures
