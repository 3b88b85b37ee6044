"""The numbers of chunk graphs for each training step: for Megatron's log line and TensorBoard."""

from __future__ import annotations

from collections import Counter

from chunkgraph.megatron.attachment import MegatronChunkGraphs

__all__ = ["StepMetrics"]


class StepMetrics:
    """Differences of the engine's counters on this rank, by step and by line of the log.

    Args:
        graphs: attached to the model that is trained.
    """

    def __init__(self, graphs: MegatronChunkGraphs) -> None:
        self._graphs = graphs
        self._last = self._line = self._read()
        self._step: Counter[str] = Counter()

    def step(self) -> None:
        """Note that a training step is over; evaluation since the last one is counted with it."""
        now = self._read()
        self._step, self._last = now - self._last, now

    def scalars(self) -> dict[str, float]:
        """Of the last step, by names for TensorBoard; memory in bytes, times in seconds."""
        report = self._graphs.engine.report
        return {
            "chunk-graphs/replays": self._step["replays"],
            **self._dropped(self._step, "chunk-graphs/dropped-tokens"),
            # From the first on, also where there are none: a curve shows its last value.
            **{
                f"chunk-graphs/eager-steps/{reason}": self._step[f"eager: {reason}"]
                for reason in self._graphs.counters.fallbacks
            },
            **{
                f"chunk-graphs/steps-run-anew/{reason}": self._step[f"anew: {reason}"]
                for reason in self._graphs.counters.overflow_reruns
            },
            "chunk-graphs/capture-seconds": report.duration_ms / 1e3 if report else 0.0,
            "chunk-graphs/pool-bytes": (
                report.slot_bytes + report.scratch_bytes + report.static_bytes if report else 0
            ),
        }

    def take_line(self) -> str:
        """What happened since the last call, as `` name: value |`` for each."""
        now = self._read()
        since, self._line = now - self._line, now
        parts = [f" graph replays: {since['replays']:5d} |"]
        parts += [
            f" {name}: {count} |" for name, count in self._dropped(since, "dropped tokens").items()
        ]
        parts += [
            f" steps run anew ({reason.removeprefix('anew: ')}): {count} |"
            for reason, count in since.items()
            if reason.startswith("anew: ")
        ]
        parts += [
            f" eager steps ({reason.removeprefix('eager: ')}): {count} |"
            for reason, count in since.items()
            if reason.startswith("eager: ")
        ]
        return "".join(parts)

    def _dropped(self, since: Counter[str], name: str) -> dict[str, int]:
        """What experts had no room for, as far as it has arrived from the device."""
        return {name: since["dropped tokens"]} if self._graphs.dropped_tokens() else {}

    def _read(self) -> Counter[str]:
        counters = self._graphs.counters
        return Counter(
            {
                "replays": counters.replays,
                "dropped tokens": sum(self._graphs.dropped_tokens().values()),
                **{f"eager: {reason}": n for reason, n in counters.fallbacks.items()},
                **{f"anew: {reason}": n for reason, n in counters.overflow_reruns.items()},
            }
        )
