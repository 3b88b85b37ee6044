"""Compute kernel times from a profiler's trace.

A kernel belongs to its launch: in the trace, launch and kernel share a correlation number, and all
kernels of a graph have that of the graph's launch. Launches from the main thread inside a range
``forward c`` are forwards of chunk ``c``. Launches from autograd's thread are backwards of the
chunk whose mark ``backward c`` was last on that thread. Other launches are neither.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PREFIX", "KernelTimes", "kernel_times"]

PREFIX = "chunkgraph bench "
"""Prefix of the names of ranges: ``step``, ``forward c`` and ``backward c``."""

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST = {"cuda_runtime", "cuda_driver"}
# These kernels wait for another rank and do not count as work.
_POINT_TO_POINT = ("sendrecv",)
_COLLECTIVE = ("nccl",)
# DeepEP's kernels, by namespace or by name.
_DISPATCH = (
    *("hybrid_ep::", "deep_ep::", "permute_kernel", "_row_id_map_pass", "device_sync_kernel"),
    *("pad_tokens_per_expert_kernel", "update_expected_value_kernel", "ag_nvl_kernel"),
)
# Whole names of chunkgraph's and Megatron's kernels.
_STASH = ("_take", "_give_back", "_copy_row", "paged_stash_copy_kernel", "paged_stash_pop_kernel")

_Interval = tuple[float, float]
_ALL = (float("-inf"), float("inf"))


@dataclass
class KernelTimes:
    """Device time of one rank, summed over all profiled steps, in ms.

    Attributes:
        total: Time of all kernels and copies except sends and receives.
        forward: Time of forwards by chunk.
        backward: Time of backwards by chunk.
        dispatch: Time of DeepEP's kernels, which wait for other ranks, and of all kernels that
            permute rows (by name), anywhere.
        stash: Time of the stash's kernels.
        send_receive: Time of NCCL's sends and receives, which all-to-all dispatch uses; not part
            of ``total``.
        other: Time of other kernels (optimizer, zeroing, copies for communication), without
            collectives.
        graph_busy: Time in which any kernel of a graph ran, from its first to its last kernel.
        graph_span: Time from a graph's first to its last kernel, summed over graph launches.
        idle_at_copies: Idle time in graphs right before or after a memset or memcpy of the graph
            (see `chunkgraph.graphs.memset_nodes`).
        num_graph_copies: Number of these memsets and copies.
        idle: Time of the steps in which at most sends and receives ran, by place:
            ``before_graphs`` of the step, ``in_graphs`` from each graph's first kernel to its last,
            ``between_graphs`` and ``after_graphs``. A step lasts from its call to its end, for
            which the host waits. Empty without graphs.
        num_graph_launches: Number of calls of ``cudaGraphLaunch``.
        num_kernel_launches: Number of launches of single kernels.
    """

    total: float = 0.0
    forward: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    dispatch: float = 0.0
    stash: float = 0.0
    send_receive: float = 0.0
    other: float = 0.0
    graph_busy: float = 0.0
    graph_span: float = 0.0
    idle_at_copies: float = 0.0
    num_graph_copies: int = 0
    idle: dict[str, float] = field(default_factory=dict)
    num_graph_launches: int = 0
    num_kernel_launches: int = 0

    @property
    def kernel_share(self) -> float | None:
        """Return the share of the graphs' time in which a kernel runs; None without graphs."""
        return self.graph_busy / self.graph_span if self.graph_span else None


def kernel_times(events: Sequence[Mapping[str, Any]]) -> KernelTimes:
    """Compute the times from the events of a trace in Chrome's format (``traceEvents``)."""
    times = KernelTimes()
    places = _Places(events)
    launches: dict[int, tuple[str, int | None]] = {}
    graph_launches: set[int] = set()
    for event in events:
        if event.get("cat") not in _HOST or not places.is_in_step(event):
            continue
        correlation = event.get("args", {}).get("correlation")
        if correlation is None:
            continue
        launches[correlation] = places.of(event)
        name = event["name"]
        if "GraphLaunch" in name:
            graph_launches.add(correlation)
            times.num_graph_launches += 1
        elif "LaunchKernel" in name:
            times.num_kernel_launches += 1
    in_graphs: dict[int, list[_Interval]] = defaultdict(list)
    computing: list[_Interval] = []
    copies: dict[int, set[_Interval]] = defaultdict(set)
    for event in events:
        if event.get("cat") not in _DEVICE:
            continue
        correlation = event.get("args", {}).get("correlation")
        if correlation not in launches:
            continue
        name, ms = event["name"].lower(), float(event["dur"]) / 1e3
        interval = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if correlation in graph_launches:
            in_graphs[correlation].append(interval)
            if event["cat"] != "kernel":
                copies[correlation].add(interval)
                times.num_graph_copies += 1
        if any(word in name for word in _POINT_TO_POINT):
            times.send_receive += ms
            continue
        computing.append(interval)
        times.total += ms
        if any(word in name for word in _DISPATCH):
            times.dispatch += ms
        elif name in _STASH:
            times.stash += ms
        what, chunk = launches[correlation]
        if what == "other":
            if not any(word in name for word in _COLLECTIVE):
                times.other += ms
        elif chunk is not None:
            target = times.forward if what == "forward" else times.backward
            target[chunk] += ms
    spans: list[_Interval] = []
    for launch, intervals in in_graphs.items():
        times.graph_busy += _covered(intervals) / 1e3
        times.idle_at_copies += _idle_next_to(copies[launch], intervals) / 1e3
        start, end = min(a for a, _ in intervals), max(b for _, b in intervals)
        times.graph_span += (end - start) / 1e3
        spans.append((start, end))
    for place, idle in _idle_by_place(places.steps, spans, computing).items():
        times.idle[place] = idle / 1e3
    return times


def _idle_by_place(
    steps: Sequence[_Interval], graphs: Sequence[_Interval], computing: Sequence[_Interval]
) -> dict[str, float]:
    """Return `KernelTimes.idle`, in the unit of the trace."""
    idle: dict[str, float] = defaultdict(float)
    for step in steps:
        inside = [span for span in graphs if step[0] <= span[0] <= step[1]]
        if not inside:
            continue
        first, last = min(a for a, _ in inside), max(b for _, b in inside)
        busy = [*inside, *computing]
        idle["before_graphs"] += first - step[0] - _covered(computing, (step[0], first))
        idle["in_graphs"] += _covered(inside) - _covered_both(inside, computing)
        idle["between_graphs"] += last - first - _covered(busy, (first, last))
        idle["after_graphs"] += step[1] - last - _covered(computing, (last, step[1]))
    return idle


def _covered_both(some: Sequence[_Interval], others: Sequence[_Interval]) -> float:
    """Return the length of the overlap of both unions."""
    return _covered(some) + _covered(others) - _covered([*some, *others])


class _Places:
    """Find the part of a step that a host event belongs to."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.steps: list[_Interval] = []
        self._main: Any = None
        self._forwards: list[tuple[float, float, int]] = []
        self._backwards: dict[Any, list[tuple[float, int]]] = defaultdict(list)
        for event in events:
            name = str(event.get("name", ""))
            if event.get("cat") != "user_annotation" or not name.startswith(PREFIX):
                continue
            start, end = float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))
            what, _, chunk = name.removeprefix(PREFIX).partition(" ")
            if what == "step":
                self.steps.append((start, end))
                self._main = event["tid"]
            elif what == "forward":
                self._forwards.append((start, end, int(chunk)))
            else:
                self._backwards[event["tid"]].append((start, int(chunk)))
        self._forwards.sort()
        for marks in self._backwards.values():
            marks.sort()

    def is_in_step(self, event: Mapping[str, Any]) -> bool:
        return any(start <= event["ts"] <= end for start, end in self.steps)

    def of(self, event: Mapping[str, Any]) -> tuple[str, int | None]:
        start = float(event["ts"])
        if event["tid"] == self._main:
            at = bisect.bisect_right(self._forwards, (start, float("inf"), 0)) - 1
            if at >= 0 and start <= self._forwards[at][1]:
                return "forward", self._forwards[at][2]
            return "other", None
        marks = self._backwards.get(event["tid"], [])
        at = bisect.bisect_right(marks, (start, 1 << 30)) - 1
        if marks:
            # Work before the first mark is the backward of its loss.
            return "backward", marks[max(at, 0)][1]
        return "other", None


def _idle_next_to(some: Container[_Interval], intervals: Sequence[_Interval]) -> float:
    """Return the length of the gaps between intervals that begin or end with one of ``some``."""
    latest, *others = sorted(intervals)
    idle = 0.0
    for interval in others:
        if interval[0] > latest[1] and (interval in some or latest in some):
            idle += interval[0] - latest[1]
        latest = max(latest, interval, key=lambda one: one[1])
    return idle


def _covered(intervals: Sequence[_Interval], within: _Interval = _ALL) -> float:
    """Return the length of the union of intervals, limited to ``within``."""
    total, end = 0.0, within[0]
    for a, b in sorted(intervals):
        upto = min(b, within[1])
        total += max(0.0, upto - max(a, end))
        end = max(end, upto)
    return total
