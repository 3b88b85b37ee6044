"""``chunkgraph doctor``: show what chunk graphs can use on this machine, and what to install."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkgraph._outputs import check_output, write_output
from chunkgraph.cli.arguments import add_json, prints_json

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from chunkgraph.cli.machine import Finding

__all__ = ["add_parser", "run"]

_NEEDS = {
    "plan": (),
    "train on a CPU": ("torch", "capture", "megatron-core"),
    "train on GPUs": ("torch", "GPUs", "capture", "megatron-core", "Transformer Engine"),
    "launch Megatron's scripts": ("torch", "capture", "megatron-core", "megatron.training"),
    "run torch's pipelines": ("torch", "capture"),
    "train experts": ("torch", "capture", "megatron-core"),
}
"""Findings that each use of a machine needs."""
_WITHOUT_CAPACITY = {"grouped GEMM"}
_STYLES = {"ok": "green", "absent": "yellow", "wrong": "bold red"}


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what chunk graphs can use on this machine",
        description="Check Python, torch, GPUs, Megatron-core, Transformer Engine and the "
        "requirements of mixture of experts, and capture and replay a small module. Nothing is "
        "changed. Exit code 1 if an installed component does not work with chunk graphs.",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    check_output("doctor: --json", args.json)
    console = Console(stderr=True)
    with console.status("checking this machine") as status:
        from chunkgraph.cli.machine import examine

        findings = examine(lambda name: status.update(f"looking at {name}"))
    uses = list(_verdicts(findings))
    if args.json is not None:
        items = [*map(asdict, findings), *map(asdict, uses)]
        content = json.dumps(items, indent=1)
        write_output("doctor: --json", args.json, f"{content}\n")
    if not prints_json(args):
        table = Table(box=None, pad_edge=False, show_header=False)
        for finding in findings:
            text = f"{finding.found}; {finding.advice}" if finding.advice else finding.found
            # Text, not str: brackets in advice are not markup.
            table.add_row(finding.name, Text(finding.state, _STYLES[finding.state]), Text(text))
        console = Console(highlight=False)
        console.print(table)
        console.print("\nThis machine can be used to", style="bold")
        verdict = Table(box=None, pad_edge=False, show_header=False)
        for use in uses:
            state = Text("yes", "bold green") if use.is_ready else Text("no", "bold red")
            verdict.add_row(use.name, state, Text(use.reason))
        console.print(verdict)
    return int(any(finding.state == "wrong" for finding in findings))


@dataclass(frozen=True)
class _Verdict:
    """Whether a machine is ready for one use.

    Attributes:
        name: Name of the use.
        is_ready: Whether everything it needs is there.
        reason: Reason why the machine is not ready, or limit of the use; empty if there is none.
    """

    name: str
    is_ready: bool
    reason: str = ""


def _verdicts(findings: Sequence[Finding]) -> Iterator[_Verdict]:
    working = {finding.name for finding in findings if finding.state == "ok"}
    for use, needs in _NEEDS.items():
        missing = ", ".join(name for name in needs if name not in working)
        reason = f"needs {missing} (see above)" if missing else ""
        if use == "train experts" and not missing and not working & _WITHOUT_CAPACITY:
            reason = "with moe_expert_capacity_factor alone"
        yield _Verdict(use, not missing, reason)
