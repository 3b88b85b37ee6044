"""Metrics of chunk graphs for each training step, for Megatron's log line and TensorBoard."""

from __future__ import annotations

from collections import Counter

from chunkgraph.megatron.attachment import MegatronChunkGraphs
from chunkgraph.megatron.features.experts.feature import dropped_tokens

__all__ = ["StepMetrics"]


class StepMetrics:
    """Differences of the engine's counters on this rank, by step and by log line.

    Args:
        graphs: Graphs attached to the trained model.
    """

    def __init__(self, graphs: MegatronChunkGraphs) -> None:
        self._graphs = graphs
        self._last = self._line = self._read()
        self._step: Counter[str] = Counter()

    def step(self) -> None:
        """Record the end of a training step; evaluation since the previous one counts with it."""
        now = self._read()
        self._step, self._last = now - self._last, now

    def scalars(self) -> dict[str, float]:
        """Return the last step's metrics by TensorBoard name; memory in bytes, times in seconds."""
        report = self._graphs.engine.report
        return {
            "chunk-graphs/replays": self._step["replays"],
            **self._dropped(self._step, "chunk-graphs/dropped-tokens"),
            # Every reason from its first occurrence on, also at 0: a curve repeats its last value.
            **{
                f"chunk-graphs/eager-steps/{reason}": self._step[f"eager: {reason}"]
                for reason in self._graphs.counters.fallbacks
            },
            **{
                f"chunk-graphs/steps-run-again/{reason}": self._step[f"rerun: {reason}"]
                for reason in self._graphs.counters.overflow_reruns
            },
            "chunk-graphs/capture-seconds": report.duration_ms / 1e3 if report else 0.0,
            "chunk-graphs/pool-bytes": (
                report.slot_bytes + report.scratch_bytes + report.static_bytes if report else 0
            ),
        }

    def take_line(self) -> str:
        """Return the metrics since the last call, each as `` name: value |``."""
        now = self._read()
        since, self._line = now - self._line, now
        parts = [f" graph replays: {since['replays']:5d} |"]
        parts += [
            f" {name}: {count} |" for name, count in self._dropped(since, "dropped tokens").items()
        ]
        parts += [
            f" steps run again ({reason.removeprefix('rerun: ')}): {count} |"
            for reason, count in since.items()
            if reason.startswith("rerun: ")
        ]
        parts += [
            f" eager steps ({reason.removeprefix('eager: ')}): {count} |"
            for reason, count in since.items()
            if reason.startswith("eager: ")
        ]
        return "".join(parts)

    def _dropped(self, since: Counter[str], name: str) -> dict[str, int]:
        """Return the number of dropped tokens that has arrived from the device."""
        return {name: since["dropped tokens"]} if dropped_tokens(self._graphs) else {}

    def _read(self) -> Counter[str]:
        counters = self._graphs.counters
        return Counter(
            {
                "replays": counters.replays,
                "dropped tokens": sum(dropped_tokens(self._graphs).values()),
                **{f"eager: {reason}": n for reason, n in counters.fallbacks.items()},
                **{f"rerun: {reason}": n for reason, n in counters.overflow_reruns.items()},
            }
        )
