"""Show a training run: its progress, the closing table in 80 columns, and the results as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from chunkgraph._outputs import stream_next_to, write_output
from chunkgraph._text import REPORT_WIDTH, counted, format_bytes
from chunkgraph.settings import Config, resolved, to_mapping
from chunkgraph.trainer.results import RunResults, StepRecord, StepResult, find_failures

_PHASES = {"eager": "eager", "chunk": "chunk graphs"}
_VERIFIED = {
    "poison": "no replay read memory that others had freed",
    "shadow": "every replay was equal to an eager pass on the same inputs",
}


class TrainProgress:
    """Shows the steps and captures of rank 0 on standard error, apart from the report."""

    def __init__(self, config: Config, *, is_shown: bool = True) -> None:
        self._print = Console(
            stderr=True, quiet=not is_shown, soft_wrap=True, highlight=False, markup=False
        ).print
        self._num_steps = len(config.train.num_microbatches)
        pipeline = config.pipeline
        self._print(
            f"processes: {pipeline.world_size} on {config.device}, "
            f"pipeline {pipeline.pipeline_model_parallel_size} x {pipeline.num_model_chunks}, "
            f"steps: {self._num_steps}"
        )

    def step(self, phase: str, record: StepRecord) -> None:
        """Show a step of the phase ``eager`` or ``chunk``."""
        if record.captures:
            self._print(f"{_PHASES[phase]}: captured")
        note = f"{counted(record.num_microbatches, 'microbatch')}, loss {record.loss:.6f}"
        self._print(f"{_PHASES[phase]}: step {record.step + 1}/{self._num_steps}  {note}")


def report(config: Config, results: RunResults, json_file: Path | None) -> list[str]:
    """Print the closing table, write the results to the file, if any, and return the failures."""
    console = Console(file=stream_next_to(json_file), width=REPORT_WIDTH, highlight=False)
    failures = find_failures(results)
    try:
        print_report(config, results, failures, console)
    finally:  # although standard output may be on a full disk
        if json_file is not None:
            facts = {"ok": not failures, "failures": failures}
            facts |= {"config": to_mapping(resolved(config)), **asdict(results)}
            write_output("--json", json_file, json.dumps(facts, indent=2) + "\n")
    return failures


def print_report(
    config: Config, results: RunResults, failures: list[str], console: Console
) -> None:
    """Print the table, the notes and the verdict on the failures of the run."""
    console.print(_table(config, results))
    console.print()
    for line in _notes(config, results):
        console.print(line, markup=False)
    if failures:
        console.print(f"FAILED: {counted(len(failures), 'problem')}", style="bold red")
        for failure in failures:
            console.print(f"  {failure}", markup=False)
    elif config.capture.enabled and not results.capture_sessions:
        console.print("OK, but nothing was captured", style="bold yellow")
    else:
        console.print("OK", style="bold green")


def _table(config: Config, results: RunResults) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    is_compared = config.train.compare == "eager"
    columns: dict[str, Callable[[StepResult], str]] = {
        "step": lambda step: str(step.step + 1),
        "micro-\nbatches": lambda step: str(step.num_microbatches),
        "loss": lambda step: f"{step.loss:.6g}",
        "grad\nnorm": lambda step: f"{step.grad_norm:.6g}",
        "same as\neager": _verdict,
        "ms\nchunk": lambda step: f"{step.step_ms:.1f}",
        "ms\neager": lambda step: "-" if step.eager is None else f"{step.eager.step_ms:.1f}",
        "cap-\ntures": lambda step: str(step.captures or "-"),
        "re-\nplays": lambda step: str(step.replays or "-"),
        "ran\neagerly": lambda step: str(sum(step.fallbacks.values()) or "-"),
    }
    if not is_compared:
        del columns["same as\neager"], columns["ms\neager"]
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True, min_width=5)
    for step in results.steps:
        table.add_row(*(cell(step) for cell in columns.values()))
    return table


def _verdict(step: StepResult) -> str:
    if step.different is None:
        return "-"
    return "[bold red]DIFFERS[/]" if step.different else "[green]equal[/]"


def _notes(config: Config, results: RunResults) -> list[str]:
    lines = [
        f"step {step.step + 1} ran eagerly: {reason}"
        for step in results.steps
        for reason in step.fallbacks
    ]
    if config.train.compare == "eager":
        verdict = "NOT EQUAL" if results.different_parameters else "equal"
        lines.append(
            f"parameters after the run: {verdict} "
            f"({results.num_parameters_compared:,} compared, all ranks)"
        )
    slots = "; ".join(
        f"rank {rank} {list(slots)}" for rank, slots in enumerate(results.slots_per_chunk)
    )
    lines.append(
        f"graphs: {results.num_graphs} from {counted(results.capture_sessions, 'session')}, "
        f"{results.captures_after_first_session} captured later; slots per chunk: {slots}"
    )
    if config.moe.num_moe_experts is not None and config.capture.enabled:
        lines.append(
            f"tokens that an expert had no room for: {results.dropped_tokens:,}, all ranks"
        )
    lines += _banks(results)
    if config.stash.enabled and config.capture.enabled:
        sizes = ", ".join(f"{size / 2**20:.1f}" for size in results.stash_bytes)
        lines.append(f"stash of saved expert activations: {sizes} MiB by rank")
    lines += [
        f"{counted(count, 'step')} ran again eagerly, since there was no room: {name}"
        for name, count in results.overflow_reruns.items()
    ]
    lines += [f"captured again with more room: {name}" for name in results.recaptures]
    if config.capture.enabled and not results.capture_sessions:
        lines.append("nothing was captured: every step ran eagerly, for the reasons above")
    if any(results.reserved_bytes):  # unknown on a CPU
        sizes = ", ".join(map(format_bytes, results.reserved_bytes))
        lines.append(f"peak memory that torch reserved, by rank: {sizes}")
    return [*lines, *_verified(config, results)]


def _verified(config: Config, results: RunResults) -> list[str]:
    """Report what ``capture.verify`` checked."""
    if config.capture.verify == "none" or not config.capture.enabled:
        return []
    if not results.capture_sessions:
        return [f"capture.verify={config.capture.verify} verified nothing"]
    replays = [step.replays for step in results.steps if step.replays]
    steps = counted(len(replays), "replayed step")
    what = f"{steps}, {sum(replays)} forwards and their backwards on rank 0"
    return [f"capture.verify={config.capture.verify}: {what}; {_VERIFIED[config.capture.verify]}"]


def _banks(results: RunResults) -> list[str]:
    """List how often each bank was replayed, on all ranks, and which banks rank 0 lacked."""
    replays: Counter[str] = Counter()
    for of_rank in results.replays_of_bank:
        replays.update(of_rank)
    counts = "; ".join(f"{name}: {count}" for name, count in replays.items())
    lines = [f"replays, all ranks: {counts}"] if replays else []
    missing = results.missing_banks[0] if results.missing_banks else {}
    return [*lines, *(f"eager, {counted(count, 'step')}: {why}" for why, count in missing.items())]
