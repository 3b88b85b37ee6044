"""Judge what a machine can be used for, from the findings of ``chunkgraph doctor``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkgraph.cli.machine import Finding

__all__ = ["Verdict", "verdicts"]

_TRAINING = "megatron.training"
_EXPERTS = ("grouped GEMM", "DeepEP")
_NEEDS = {
    "plan": (),
    "train on a CPU": ("torch", "capture", "megatron-core"),
    "train on GPUs": ("torch", "GPUs", "capture", "megatron-core", "Transformer Engine"),
    "launch Megatron's scripts": ("torch", "capture", "megatron-core", _TRAINING),
    "run torch's pipelines": ("torch", "capture"),
}


@dataclass(frozen=True)
class Verdict:
    """Whether a machine is ready for one use.

    Attributes:
        name: Name of the use.
        is_ready: Whether everything it needs is there.
        reason: Reason why the machine is not ready, or limit of the use; empty if there is none.
    """

    name: str
    is_ready: bool
    reason: str = ""


def verdicts(findings: Iterable[Finding]) -> list[Verdict]:
    """Judge every use."""
    by_name = {finding.name: finding for finding in findings}

    def is_there(name: str) -> bool:
        return name in by_name and by_name[name].state == "ok"

    result = []
    for use, needs in _NEEDS.items():
        missing = [name for name in needs if not is_there(name)]
        result.append(Verdict(use, not missing, _needs(missing)))
    trains = all(is_there(name) for name in _NEEDS["train on a CPU"])
    ways = [name for name in _EXPERTS if is_there(name)]
    reason = "" if ways else "with moe_expert_capacity_factor alone"
    missing = [name for name in _NEEDS["train on a CPU"] if not is_there(name)]
    result.append(Verdict("train experts", trains, reason if trains else _needs(missing)))
    return result


def _needs(missing: list[str]) -> str:
    return f"needs {', '.join(missing)} (see above)" if missing else ""
