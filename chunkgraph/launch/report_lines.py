"""Report a run with chunk graphs: a line at its start, and one after the capture."""

from __future__ import annotations

from chunkgraph._text import format_bytes
from chunkgraph.engine import CaptureReport
from chunkgraph.launch.flags import GraphFlags
from chunkgraph.megatron.attachment import MegatronChunkGraphs

__all__ = ["capture_line", "start_line"]


def start_line(graphs: MegatronChunkGraphs, flags: GraphFlags) -> str:
    """Return a line about the upcoming capture on this rank.

    Args:
        graphs: The attached graphs.
        flags: Flags of chunk graphs.
    """
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


def capture_line(report: CaptureReport, expert_dispatch: str = "", rank: int = 0) -> str:
    """Return a line about the finished capture on this rank.

    Args:
        report: The report of the capture.
        expert_dispatch: See `Experts.dispatch`.
        rank: This rank.
    """
    total = report.slot_bytes + report.scratch_bytes + report.static_bytes
    slots = _slots(report.num_slots, report.shared_slots)
    return (
        f"chunk graphs: captured {report.num_graphs} graphs, {slots} on rank {rank}, "
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
