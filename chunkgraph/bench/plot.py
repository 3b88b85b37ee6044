"""Plot bench results: step time and memory by variant, and against microbatches."""

from __future__ import annotations

import importlib.util
import io
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chunkgraph._outputs import can_be_rewritten, check_output, write_output
from chunkgraph._text import shorten
from chunkgraph.errors import ConfigError, MissingDependencyError

__all__ = ["check_picture", "plot_documents", "write_picture"]

_LABELS = {
    "eager": "eager",
    "eager_dropless": "eager, all-to-all without drops",
    "eager_stash": "eager, Megatron's stash",
    "transformer_engine": "per-layer graphs (TE)",
    "local": "per-layer graphs (local)",
    "full_iteration": "full-iteration graph",
    "chunk": "chunk graphs",
}
# Distinct in grey and for colour-blind readers; only chunkgraph's is saturated.
_COLOURS = {
    "eager": "#9a9a9a",
    "eager_dropless": "#cfcfcf",
    "eager_stash": "#b8b8b8",
    "transformer_engine": "#6c8ebf",
    "local": "#b5a1d0",
    "full_iteration": "#d6b656",
    "chunk": "#d1495b",
}
_MIB = 2**20
_ENDINGS = (".png", ".svg", ".pdf")
_MOST_BARS_SIDE_BY_SIDE = 10


def check_picture(path: Path | None) -> None:
    """Check early that a picture can be drawn and written.

    Args:
        path: The picture's file; None if no picture is requested.

    Raises:
        ConfigError: The file cannot be written, or its name does not end like a picture's.
        MissingDependencyError: matplotlib is not installed.
    """
    if path is None:
        return
    check_output("--plot", path)
    if can_be_rewritten(path) and path.suffix.lower() not in _ENDINGS:
        msg = f"--plot {shorten(str(path))}: the file's name must end in .png, .svg or .pdf."
        raise ConfigError(msg)
    if importlib.util.find_spec("matplotlib") is None:
        msg = (
            "matplotlib is not installed, but --plot needs it. Install it with: "
            "pip install 'chunkgraph[plot]'"
        )
        raise MissingDependencyError(msg)


def write_picture(figure: Any, path: Path) -> None:
    """Write a matplotlib figure; as PNG if the name has no known ending.

    Raises:
        ConfigError: The figure cannot be drawn.
        OutputError: The file cannot be written.
    """
    ending = path.suffix.lower()
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=150, format=ending[1:] if ending in _ENDINGS else "png")
    except ValueError as error:
        msg = f"--plot {shorten(str(path))}: cannot be drawn: {shorten(str(error))}."
        raise ConfigError(msg) from None
    write_output("--plot", path, content.getvalue())


def plot_documents(documents: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw one or several result documents.

    There are two panels, for step time and reserved memory, with a group of bars for each config
    (one above the other if there are many bars). Each document whose microbatch count changes gets
    one more panel, for step time against this count.

    Raises:
        ConfigError: Nothing in the documents can be drawn.
        OutputError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [(str(d["config"]), _ran(d)) for d in documents]
    names = [name for name in _LABELS if any(name in ran for _, ran in measured)]
    if not names:
        msg = "No variant in these results finished its steps; there is nothing to draw."
        raise ConfigError(msg)
    varying = [(config, ran) for config, ran in measured if _changes(ran)]
    num_bars = sum(len(ran) for _, ran in measured)
    num_rows = 1 if num_bars <= _MOST_BARS_SIDE_BY_SIDE else 2
    width = max(9.0, 1.0 + 0.9 * num_bars / num_rows)
    height = 0.6 + 3.8 * (num_rows + len(varying))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(num_rows + len(varying), 2)
    if num_rows == 1:
        times, memory = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    else:
        times, memory = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, :])
    _bars(times, measured, names, "step_ms", 1.0, "ms a step (median)")
    _bars(memory, measured, names, "reserved_bytes", _MIB, "peak reserved memory, MB")
    for row, (config, ran) in enumerate(varying):
        _against_microbatches(figure.add_subplot(grid[num_rows + row, :]), config, ran)
    handles, labels = times.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(_title(documents), fontsize=10)
    write_picture(figure, path)


def _ran(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {v["name"]: v for v in document["variants"] if v["error"] is None}


def _changes(ran: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(len(set(v.get("num_microbatches") or ())) > 1 for v in ran.values())


def _bars(
    axes: Any,
    measured: Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]],
    names: Sequence[str],
    key: str,
    unit: float,
    title: str,
) -> None:
    bar = 0.8 / len(names)
    for name in names:
        places, heights = [], []
        for group, (_, ran) in enumerate(measured):
            if name in ran and ran[name].get(key) is not None:
                shown = [other for other in names if other in ran]
                places.append(group + (shown.index(name) - (len(shown) - 1) / 2) * bar)
                heights.append(ran[name][key] / unit)
        drawn = axes.bar(
            places, heights, width=0.92 * bar, color=_COLOURS[name], label=_LABELS[name]
        )
        axes.bar_label(drawn, fmt="%.0f", fontsize=7, padding=1)
    axes.set_xticks(range(len(measured)), [config for config, _ in measured])
    if len(measured) > 3:
        axes.tick_params(axis="x", labelrotation=30)
    axes.set_title(title, fontsize=10)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)


def _against_microbatches(axes: Any, config: str, ran: Mapping[str, Mapping[str, Any]]) -> None:
    for name, variant in ran.items():
        by_count: dict[int, list[float]] = defaultdict(list)
        for count, ms in zip(variant["num_microbatches"], variant["step_ms_all"], strict=True):
            by_count[count].append(ms)
        counts = sorted(by_count)
        axes.plot(
            counts,
            [statistics.median(by_count[count]) for count in counts],
            marker="o",
            markersize=4,
            color=_COLOURS[name],
        )
    axes.set_title(f"{config}: ms a step against its number of microbatches", fontsize=10)
    axes.set_xlabel("microbatches")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def _title(documents: Sequence[Mapping[str, Any]]) -> str:
    first = documents[0]
    places = {f"{d['num_gpus'] or ''} {d['device']}".strip() for d in documents}
    versions = first.get("versions") or {}
    packages = ("torch", "megatron_core", "transformer_engine")
    stack = ", ".join(f"{name} {versions[name]}" for name in packages if name in versions)
    return f"{', '.join(sorted(places))}; {stack}"
