"""Merge the profiler's traces of all ranks into one, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["merge_traces", "read_traces"]

_PID_STRIDE = 1_000_000_000
_NS_PER_US = 1000.0


def read_traces(folder: Path) -> list[Mapping[str, Any]]:
    """Read the traces that the ranks of a variant left in its folder, in the order of ranks."""
    paths = sorted(folder.glob("trace_rank*.json"), key=lambda p: int(p.stem.split("rank")[1]))
    return [json.loads(path.read_text(encoding="utf-8", errors="replace")) for path in paths]


def merge_traces(traces: Sequence[Mapping[str, Any]]) -> str:
    """Return one trace; prefix the names of each rank's processes with the rank."""
    base_ns = float(traces[0].get("baseTimeNanoseconds", 0))
    events: list[dict[str, Any]] = []
    for rank, trace in enumerate(traces):
        shift_us = (float(trace.get("baseTimeNanoseconds", base_ns)) - base_ns) / _NS_PER_US
        for event in trace["traceEvents"]:
            own = dict(event)
            if "pid" in own:
                pid = own["pid"]
                own["pid"] = (
                    rank * _PID_STRIDE + pid if isinstance(pid, int) else f"rank {rank}: {pid}"
                )
            if "ts" in own:
                own["ts"] = float(own["ts"]) + shift_us
            if "id" in own:  # of arrows, which do not cross ranks
                own["id"] = f"{rank}.{own['id']}"
            if own.get("name") == "process_name":
                own["args"] = {"name": f"rank {rank}: {own['args']['name']}"}
            events.append(own)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
