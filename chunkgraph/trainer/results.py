"""Read and write the results of a training run, and check them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from chunkgraph.errors import WorkerError
from chunkgraph.settings import Config

__all__ = ["RunResults", "StepResult", "find_failures", "read_results", "results_from"]

_Result = TypeVar("_Result", "StepResult", "RunResults")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one step; values of the eager run are None without one."""

    step: int
    """Step, from 0."""
    num_microbatches: int
    """Number of microbatches of the step."""
    loss_chunk: float
    """Mean loss of the run with captured chunks."""
    loss_eager: float | None = None
    """Mean loss of the eager run."""
    grad_norm_chunk: float
    """Gradient norm before clipping, with captured chunks."""
    grad_norm_eager: float | None = None
    """Gradient norm before clipping, eager."""
    loss_chunk_hex: str = ""
    """`loss_chunk` to the last bit."""
    loss_eager_hex: str | None = None
    """`loss_eager` to the last bit."""
    grad_norm_chunk_hex: str = ""
    """`grad_norm_chunk` to the last bit."""
    grad_norm_eager_hex: str | None = None
    """`grad_norm_eager` to the last bit."""
    loss_equal: bool | None = None
    """True if the losses agree to the last bit."""
    grad_norm_equal: bool | None = None
    """True if the gradient norms agree to the last bit."""
    expert_metrics: Mapping[str, float] = field(default_factory=dict)
    """Each metric of the experts (auxiliary losses) over all layers, microbatches and ranks."""
    expert_metrics_equal: bool | None = None
    """True if these metrics agree to the last bit, on all ranks."""
    context_sizes: Sequence[Sequence[int]] = ()
    """Context-parallel size of each microbatch, for each rank, if sizes differ."""
    captures: int
    """Number of slots captured in this step, on rank 0."""
    replays: int
    """Number of forwards replayed in this step, on rank 0."""
    fallbacks: Mapping[str, int]
    """Reasons for which the step ran eagerly, each with the number of steps."""
    step_ms_chunk: float
    """Time of the step with captured chunks, in ms."""
    step_ms_eager: float | None = None
    """Time of the eager step, in ms."""

    @property
    def is_equal(self) -> bool | None:
        """Return whether loss, norm and metrics agree to the last bit; None if not compared."""
        if self.loss_equal is None or self.grad_norm_equal is None:
            return None
        return self.loss_equal and self.grad_norm_equal and self.expert_metrics_equal is not False


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """Results of a whole run of all ranks; the fields are the keys of ``--json``."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the relevant packages, by name."""
    steps: Sequence[StepResult]
    """The steps, in order."""
    parameters_equal: bool | None
    """True if every parameter agrees to the last bit after the run, on all ranks."""
    different_parameters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the parameters that differ, by rank."""
    num_parameters_compared: int
    """Number of compared parameters of all ranks together."""
    capture_sessions: int
    """Number of sessions that captured graphs."""
    captures_after_first_session: int
    """Number of slots captured later, except captures with more room; must be 0."""
    slots_per_chunk: Sequence[Sequence[int]]
    """Number of slots of each chunk, for each rank."""
    num_graphs: int
    """Number of graphs of all ranks together."""
    dropped_tokens: int = 0
    """Number of tokens for which an expert had no room, in all steps and ranks together."""
    overflow_reruns: Mapping[str, int] = field(default_factory=dict)
    """Number of repeated steps, by the feature that had no room."""
    recaptures: Sequence[str] = ()
    """The reason of each capture with more room."""
    stash_bytes: Sequence[int] = ()
    """Bytes of the stash's pages, for each rank."""
    bytes_without_stash: Sequence[int] = ()
    """Bytes that slots would hold without the stash, for each rank."""
    replays_of_bank: Sequence[Mapping[str, int]] = ()
    """Number of replayed forwards by bank, for each rank, if there are several banks."""
    missing_banks: Sequence[Mapping[str, int]] = ()
    """Number of eager steps by the bank that has no graphs and why, for each rank."""
    memsets_kept: Sequence[str] = ()
    """Why memsets in graphs are not replaced by kernels, for each rank; "" if they are."""
    reserved_bytes: Sequence[int] = ()
    """Most memory that torch held on the device, for each rank; 0 on a CPU."""
    gpu_used_bytes: Sequence[int] = ()
    """Memory in use on the whole GPU after the last step, for each rank; 0 on a CPU."""

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def read_results(path: Path) -> RunResults:
    """Read the results of rank 0.

    Raises:
        WorkerError: The file is missing or incomplete, although every worker succeeded.
    """
    try:
        return results_from(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = (
            f"The workers ended without an error, but the results of rank 0 ({path.name}) are "
            f"missing or incomplete: {type(error).__name__}: {error}. Run again with --debug."
        )
        raise WorkerError(msg) from None


def results_from(mapping: Mapping[str, Any]) -> RunResults:
    """Return the results of a mapping from `RunResults.to_mapping`.

    Raises:
        KeyError: There are no steps.
        TypeError: A value is missing.
    """
    steps = [_from_mapping(StepResult, step) for step in mapping["steps"]]
    return _from_mapping(RunResults, {**mapping, "steps": steps})


def _from_mapping(kind: type[_Result], mapping: Mapping[str, Any]) -> _Result:
    return kind(**{f.name: mapping[f.name] for f in fields(kind) if f.name in mapping})


def find_failures(config: Config, results: RunResults) -> list[str]:
    """List the failures of a run, such as values that differ from eager; empty for none."""
    failures: list[str] = []
    if len(results.steps) != len(config.train.num_microbatches):
        failures.append(
            f"{len(config.train.num_microbatches)} steps were requested, but "
            f"{len(results.steps)} ran"
        )
    must_compare = config.train.compare == "eager"
    for step in results.steps:
        where = f"step {step.step + 1}"
        if not (math.isfinite(step.loss_chunk) and math.isfinite(step.grad_norm_chunk)):
            failures.append(f"{where}: the loss or gradient norm is not a finite number")
        if must_compare and step.is_equal is None:
            failures.append(f"{where}: was not compared with eager")
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
    if must_compare and not results.parameters_equal:
        failures.append(
            "the parameters after the run differ from the eager run's"
            if results.parameters_equal is False
            else "the parameters after the run were not compared"
        )
    if results.captures_after_first_session:
        failures.append(
            f"{results.captures_after_first_session} slot(s) were captured after the first session"
        )
    return failures
