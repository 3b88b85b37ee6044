"""The result document of ``chunkgraph bench``: one JSON object, complete after every variant."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunkgraph._outputs import write_output
from chunkgraph.bench.choice import UNCOMPARED
from chunkgraph.bench.simulated import merged_costs, simulated_steps
from chunkgraph.settings import Config, to_mapping

__all__ = ["BenchDocument", "VariantResult"]

_MEASURED = (
    *("step_ms", "step_ms_all", "reserved_bytes", "allocated_bytes", "capture_s"),
    *("host_us_forward", "host_us_backward", "kernel_share", "ideal_ms"),
    "num_captures_after_first",
)
_OF_THE_RUN = ("device", "num_gpus", "versions", "is_deterministic")


@dataclass
class VariantResult:
    """The results of one variant.

    Attributes:
        name: Name of the variant.
        error: Reason that the variant did not finish its steps, or None.
        values: Results of rank 0; empty if it wrote none.
        note: Failure after the measured steps, or None.
    """

    name: str
    error: str | None
    values: dict[str, Any] = field(default_factory=dict)
    note: str | None = None

    @classmethod
    def failed(cls, name: str, error: str) -> VariantResult:
        """Return a variant without results."""
        return cls(name, error)

    @classmethod
    def read(cls, name: str, path: Path, error: str | None) -> VariantResult:
        """Read the workers' results; a failure after the measured steps becomes a note."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            return cls(name, error or f"the workers left no results ({problem})")
        note = None
        if error is not None:
            note = f"failed after phase {values.get('phase')!r}: {error}"
        return cls(name, None, values, note)

    @property
    def step_ms(self) -> float:
        """Median time of a step, in ms; NaN without one."""
        return float(self.values.get("step_ms", float("nan")))

    def get(self, key: str) -> Any:
        """Return a measured value, or None."""
        return self.values.get(key)

    def first_difference(self, other: VariantResult) -> str | None:
        """Describe the first difference to another variant's results; None if there is none."""
        for key, name in (("losses_hex", "loss"), ("grad_norms_hex", "gradient norm")):
            pairs = zip(self.values[key], other.values[key], strict=True)
            for step, (left, right) in enumerate(pairs):
                if left != right:
                    return (
                        f"{name} of step {step + 1}: "
                        f"{float.fromhex(left)!r} and {float.fromhex(right)!r}"
                    )
        hashes = zip(
            self.values["parameters_sha256"], other.values["parameters_sha256"], strict=True
        )
        for rank, (left, right) in enumerate(hashes):
            if left != right:
                return f"parameters of rank {rank} after the measured steps"
        return None


@dataclass
class BenchDocument:
    """All results of one bench."""

    head: dict[str, Any]
    results: list[VariantResult] = field(default_factory=list)
    config: Config | None = None

    @classmethod
    def start(cls, config: Config, *, command: str, commit: str | None) -> BenchDocument:
        """Return an empty document."""
        return cls(
            {
                "config": config.name,
                "device": None,
                "num_gpus": None,
                "versions": None,
                "is_deterministic": None,
                "command": command,
                "commit": commit or _commit(),
                "settings": to_mapping(config),
            },
            config=config,
        )

    def add(self, result: VariantResult) -> None:
        """Add a variant; the first one with results determines the device."""
        self.results.append(result)
        for key in _OF_THE_RUN:
            if self.head[key] is None:
                self.head[key] = result.values.get(key)

    def result(self, name: str) -> VariantResult | None:
        """Return a variant that finished, by name; None if there is none."""
        return next((r for r in self.results if r.name == name and r.error is None), None)

    @property
    def demands_equality(self) -> bool:
        """Return whether a difference is a failure: not with nondeterministic GPU kernels."""
        return self.head["is_deterministic"] is not False or not self.head["num_gpus"]

    def equality(self, result: VariantResult) -> tuple[bool | None, str | None]:
        """Compare a variant with eager, bit for bit.

        Returns:
            Whether it is equal, or None if it is not compared; and the first difference, or None.
        """
        eager = self.result("eager")
        if eager is None or result.error is not None or result.name in UNCOMPARED:
            return None, None
        difference = result.first_difference(eager)
        return difference is None, difference

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            **self.head,
            "costs_ms": self.costs_ms or None,
            "optimizer_ms": self.optimizer_ms,
            "simulated_step_ms": self.simulated_step_ms,
            "variants": [self._variant(result) for result in self.results],
        }

    @property
    def costs_ms(self) -> dict[str, float]:
        """Return the ms of a chunk's F, B, I and W, as far as variants measured them."""
        return merged_costs(result.get("costs_ms") for result in self.results)

    @property
    def optimizer_ms(self) -> float | None:
        """Return the ms of the optimizer that the first variant measured."""
        times = (result.get("optimizer_ms") for result in self.results)
        return next((ms for ms in times if ms is not None), None)

    @property
    def simulated_step_ms(self) -> dict[str, dict[str, float]]:
        """Return the simulated ms of a step by schedule and pipeline size; empty without costs."""
        return (
            {}
            if self.config is None
            else simulated_steps(self.costs_ms, self.config, self.optimizer_ms or 0.0)
        )

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            OutputError: The file cannot be written.
        """
        write_output("--json", path, json.dumps(self.to_mapping(), indent=1) + "\n")

    def _loss_difference(self, result: VariantResult) -> float | None:
        """Return the largest relative difference of a loss to eager's; None if either failed."""
        eager = self.result("eager")
        if eager is None or result.error is not None:
            return None
        pairs = zip(result.values["losses_hex"], eager.values["losses_hex"], strict=True)
        losses = [(float.fromhex(loss), float.fromhex(base)) for loss, base in pairs]
        return max(abs(loss - base) / max(abs(base), 1e-30) for loss, base in losses)

    def _variant(self, result: VariantResult) -> Mapping[str, Any]:
        is_equal, difference = self.equality(result)
        rest = {
            key: value
            for key, value in result.values.items()
            if key not in (*_MEASURED, *_OF_THE_RUN)
        }
        return {
            "name": result.name,
            "error": result.error,
            **{key: result.values.get(key) for key in _MEASURED},
            "equal_to_eager": is_equal,
            "first_difference": difference,
            "largest_loss_difference": self._loss_difference(result),
            "note": result.note,
            **rest,
        }


def _commit() -> str | None:
    """Return the checkout's commit, marked if files differ from it; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        shown = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip() or None
