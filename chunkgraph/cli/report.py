"""The closing table of a training run, in 80 columns and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from chunkgraph._outputs import write_output
from chunkgraph._text import REPORT_WIDTH
from chunkgraph.settings import Config, resolved, to_mapping
from chunkgraph.trainer.results import RunResults, StepResult, find_failures

__all__ = ["print_report", "write_json"]


def print_report(config: Config, results: RunResults, console: Console | None = None) -> list[str]:
    """Print the table and what follows from it.

    Args:
        config: Configuration of the run.
        results: Results of the run.
        console: Console to print to; None is standard output.

    Returns:
        What broke the promise of the run; empty when nothing did.
    """
    console = console or Console(width=REPORT_WIDTH, highlight=False)
    failures = find_failures(config, results)
    console.print(_table(results))
    console.print()
    for line in _notes(config, results):
        console.print(line, markup=False)
    if failures:
        console.print(f"FAILED: {len(failures)} problem(s)", style="bold red")
        for failure in failures:
            console.print(f"  {failure}", markup=False)
    else:
        console.print("OK", style="bold green")
    return failures


def write_json(path: Path, config: Config, results: RunResults, failures: list[str]) -> None:
    """Write configuration, results and verdict."""
    content = {
        "ok": not failures,
        "failures": failures,
        "config": to_mapping(resolved(config)),
        **results.to_mapping(),
    }
    write_output("--json", path, json.dumps(content, indent=2) + "\n")


def _table(results: RunResults) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in (
        *("step", "micro-\nbatches", "loss\nchunk", "loss\neager", "norm\nchunk", "norm\neager"),
        *("to the\nlast bit", "cap-\ntures", "re-\nplays", "eager\nfall-\nbacks"),
    ):
        table.add_column(heading, justify="right", no_wrap=True, min_width=5)
    for step in results.steps:
        table.add_row(
            str(step.step + 1),
            str(step.num_microbatches),
            _number(step.loss_chunk),
            _number(step.loss_eager),
            _number(step.grad_norm_chunk),
            _number(step.grad_norm_eager),
            _verdict(step),
            str(step.captures),
            str(step.replays),
            str(sum(step.fallbacks.values()) or "-"),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _verdict(step: StepResult) -> str:
    if step.is_equal is None:
        return "-"
    return "[green]equal[/]" if step.is_equal else "[bold red]DIFFERS[/]"


def _notes(config: Config, results: RunResults) -> list[str]:
    lines = [
        f"step {step.step + 1} ran eagerly: {reason}"
        for step in results.steps
        for reason in step.fallbacks
    ]
    if config.train.compare == "eager":
        verdict = {True: "equal", False: "NOT EQUAL", None: "not compared"}
        lines.append(
            f"parameters after the run: {verdict[results.parameters_equal]} "
            f"({results.num_parameters_compared:,} compared, all ranks)"
        )
    slots = "; ".join(
        f"rank {rank} {list(slots)}" for rank, slots in enumerate(results.slots_per_chunk)
    )
    lines.append(
        f"graphs: {results.num_graphs} from {results.capture_sessions} capture session(s), "
        f"{results.captures_after_first_session} captured later; slots per chunk: {slots}"
    )
    lines += [
        f"memsets inside graphs are no kernels, which costs some microseconds each: {why}"
        for why in dict.fromkeys(results.memsets_kept)
        if why
    ]
    if config.moe.num_moe_experts is not None and config.capture.enabled:
        has_budget = config.moe.moe_token_dispatcher_type == "flex"
        what = (
            "dispatches over the ranks' budget"
            if has_budget
            else "tokens that an expert had no room for"
        )
        lines.append(f"{what}: {results.dropped_tokens:,}, all ranks")
    lines += _banks(results)
    if config.stash.enabled and config.capture.enabled:
        sizes = ", ".join(f"{size / 2**20:.1f}" for size in results.stash_bytes)
        lines.append(f"stash of saved expert activations: {sizes} MiB by rank")
    lines += [
        f"{count} step(s) ran again eagerly, since there was no room: {name}"
        for name, count in results.overflow_reruns.items()
    ]
    lines += [f"captured again with more room: {name}" for name in results.recaptures]
    if config.capture.enabled and not results.capture_sessions:
        lines.append("note: nothing was captured; see the reasons above")
    return lines


def _banks(results: RunResults) -> list[str]:
    """List how often each bank was replayed, on all ranks, and which banks rank 0 lacked."""
    replays: Counter[str] = Counter()
    for of_rank in results.replays_of_bank:
        replays.update(of_rank)
    counts = "; ".join(f"{name}: {count}" for name, count in replays.items())
    lines = [f"replays, all ranks: {counts}"] if replays else []
    missing = results.missing_banks[0] if results.missing_banks else {}
    return [*lines, *(f"{count} step(s) were eager: {why}" for why, count in missing.items())]
