"""Report a run with chunk graphs: its start, the capture, and metrics of each step."""

from __future__ import annotations

from collections import Counter

from chunkgraph._text import format_bytes
from chunkgraph.engine import CaptureReport
from chunkgraph.launch.flags import GraphFlags
from chunkgraph.megatron.attachment import MegatronChunkGraphs
from chunkgraph.megatron.features.experts.feature import dropped_tokens

__all__ = ["StepMetrics", "capture_line", "start_line"]

_REPLAYS, _DROPPED = ("replays", ""), ("dropped tokens", "")


def start_line(graphs: MegatronChunkGraphs, flags: GraphFlags) -> str:
    """Return a line about the upcoming capture on rank 0."""
    slots = graphs.num_slots
    scope: str = graphs.scope.scope
    if graphs.scope.why_block:
        scope += f" (no whole chunk with {graphs.scope.why_block})"
    num_steps = flags.capture.num_warmup_steps
    steps = f"{num_steps} eager step{'s' if num_steps > 1 else ''}"
    return (
        f"chunk graphs: scope {scope}, {_slots(slots)} on rank 0 "
        f"({2 * sum(slots) * graphs.num_banks} graphs), verify {flags.capture.verify}; "
        f"capture after {steps}"
    )


def capture_line(report: CaptureReport, expert_dispatch: str = "") -> str:
    """Return a line about the finished capture on rank 0.

    Args:
        report: The report of the capture.
        expert_dispatch: See `Experts.dispatch`.
    """
    total = report.slot_bytes + report.scratch_bytes + report.static_bytes
    slots = _slots(report.num_slots, report.shared_slots)
    return (
        f"chunk graphs: captured {report.num_graphs} graphs, {slots} on rank 0, "
        f"in {report.duration_ms / 1e3:.2f} s; {format_bytes(total)}: slots "
        f"{format_bytes(report.slot_bytes)}, scratch {format_bytes(report.scratch_bytes)}, static "
        f"{format_bytes(report.static_bytes)}"
        + (f"; experts: {expert_dispatch}" if expert_dispatch else "")
        + (f"; memset nodes were kept: {report.memsets_kept}" if report.memsets_kept else "")
    )


def _slots(num_slots: tuple[int, ...], are_shared: bool = False) -> str:
    if are_shared and len(num_slots) > 1:
        count = num_slots[0]
        return f"{count} slot{'s' if count > 1 else ''} shared by {len(num_slots)} chunks"
    counts = " + ".join(str(n) for n in num_slots)
    return f"{counts} slot{'s' if num_slots != (1,) else ''}"


class StepMetrics:
    """Differences of the engine's counters on this rank, by step and by log line.

    Args:
        graphs: Graphs attached to the trained model.
    """

    def __init__(self, graphs: MegatronChunkGraphs) -> None:
        self._graphs = graphs
        self._last = self._line = self._read()
        self._step: Counter[tuple[str, str]] = Counter()

    def step(self) -> None:
        """Record the end of a training step; evaluation since the previous one counts with it."""
        now = self._read()
        self._step, self._last = now - self._last, now

    def scalars(self) -> dict[str, float]:
        """Return the last step's metrics by TensorBoard name; memory in bytes, times in seconds."""
        report = self._graphs.engine.report
        # Every reason from its first occurrence on, also at 0: a curve repeats its last value.
        return {
            **{
                "/".join(filter(None, ("chunk-graphs", name.replace(" ", "-"), reason))): (
                    self._step[name, reason]
                )
                for name, reason in self._last
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
        parts = [f" graph replays: {since.pop(_REPLAYS, 0):5d} |"]
        if _DROPPED in now:
            parts.append(f" dropped tokens: {since.pop(_DROPPED, 0)} |")
        parts += [f" {name} ({reason}): {count} |" for (name, reason), count in since.items()]
        return "".join(parts)

    def _read(self) -> Counter[tuple[str, str]]:
        """Return the counts by name and reason; of dropped tokens, those that have arrived."""
        counters, dropped = self._graphs.counters, dropped_tokens(self._graphs)
        return Counter(
            {
                _REPLAYS: counters.replays,
                **({_DROPPED: sum(dropped.values())} if dropped else {}),
                **{("steps run again", why): n for why, n in counters.overflow_reruns.items()},
                **{("eager steps", why): n for why, n in counters.fallbacks.items()},
            }
        )
