"""Plot bench results: step time and memory by variant, and against microbatches."""

from __future__ import annotations

import importlib.util
import io
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkgraph._outputs import can_be_rewritten, check_output, write_output
from chunkgraph._text import format_bytes, shorten
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
_DESCRIPTION = {
    "PP": ("pipeline", "pipeline_model_parallel_size", None),
    "VPP": ("pipeline", "virtual_pipeline_model_parallel_size", None),
    "TP": ("pipeline", "tensor_model_parallel_size", 1),
    "CP": ("pipeline", "context_parallel_size", 1),
    "EP": ("pipeline", "expert_model_parallel_size", 1),
    "DP": ("pipeline", "data_parallel_size", 1),
    "sequence": ("model", "seq_length", None),
    "recompute": ("model", "recompute_granularity", None),
    "shared slots": ("capture", "shared_slots", False),
    "gradient fusion": ("train", "gradient_accumulation_fusion", False),
}
"""Words that describe a config: section, setting, and the usual value, which is not mentioned."""
_ENDINGS = (".png", ".svg", ".pdf")


def check_picture(path: Path | None) -> None:
    """Check early that a picture can be drawn and written.

    Args:
        path: The picture's file; None if no picture is requested.

    Raises:
        ConfigError: The file cannot be written, or its name lacks the ending of a picture.
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

    There are two panels, for step time and reserved memory (not on a CPU), both relative to eager
    training, with a group of bars for each config. A variant that did not run is hatched. Each
    document whose microbatch count changes gets one more panel, for step time against this count.

    Raises:
        ConfigError: Nothing in the documents can be drawn.
        OutputError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = [
        _Group(label, _ran(d)) for label, d in zip(_labels(documents), documents, strict=True)
    ]
    names = [n for n in _variant_names(documents) if any(n in group.ran for group in groups)]
    if not names:
        msg = "No variant in these results finished its steps; there is nothing to draw."
        raise ConfigError(msg)
    varying = [group for group in groups if _changes(group.ran)]
    has_memory = any(v.get("reserved_bytes") for group in groups for v in group.ran.values())
    bar_rows = 0.9 + 0.24 * len(groups) * (len(names) + 1)
    heights = [max(bar_rows, 2.4), *(3.0 for _ in varying)]
    figure = Figure(figsize=(12.0, 0.9 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + len(varying), 2, height_ratios=heights)
    times = figure.add_subplot(grid[0, 0] if has_memory else grid[0, :])
    _bars(times, groups, names, "step_ms", "step time")
    if has_memory:
        memory = figure.add_subplot(grid[0, 1], sharey=times)
        _bars(memory, groups, names, "reserved_bytes", "peak reserved memory")
        memory.tick_params(labelleft=False)
    for row, group in enumerate(varying):
        _against_microbatches(figure.add_subplot(grid[1 + row, :]), group)
    handles, labels = times.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False
    )
    figure.suptitle(_title(documents), fontsize=10)
    write_picture(figure, path)


@dataclass(frozen=True)
class _Group:
    """The results of one config.

    Attributes:
        label: Description of the config.
        ran: Results of the variants that finished, by name.
    """

    label: str
    ran: Mapping[str, Mapping[str, Any]]


def _variant_names(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all variants in the documents: known ones first, then schedules'."""
    names = [str(variant["name"]) for document in documents for variant in document["variants"]]
    return sorted(
        dict.fromkeys(names),
        key=lambda n: list(_LABELS).index(n) if n in _LABELS else len(_LABELS),
    )


def _label(name: str) -> str:
    return _LABELS.get(name) or name.replace("chunk_", "chunk graphs, ")


def _colour(name: str) -> str:
    return _COLOURS.get(name, "#e08a97")


def _labels(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe each config by its differences from the others, or else by its name."""
    parts = [_parts(document) for document in documents]
    labels = []
    for document, own in zip(documents, parts, strict=True):
        always = ("PP", "sequence")
        words = [
            name if value is True else f"{name} {value}"
            for name, value in own.items()
            if name in always or any(other.get(name) != value for other in parts)
        ]
        labels.append(", ".join(words) or str(document["config"]).replace("_", " "))
    return [
        label if labels.count(label) == 1 else f"{label} ({document['config']})"
        for label, document in zip(labels, documents, strict=True)
    ]


def _parts(document: Mapping[str, Any]) -> dict[str, object]:
    settings = document.get("settings") or {}
    parts: dict[str, object] = {}
    for name, (section, key, usual) in _DESCRIPTION.items():
        value = (settings.get(section) or {}).get(key, usual)
        if name in ("PP", "sequence") or value not in (usual, None):
            parts[name] = value
    counts = (settings.get("train") or {}).get("num_microbatches") or ()
    if len(set(counts)) > 1:
        parts["microbatches"] = f"{min(counts)} to {max(counts)}"
    return {name: value for name, value in parts.items() if value is not None}


def _ran(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {v["name"]: v for v in document["variants"] if v["error"] is None}


def _changes(ran: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(len(set(v.get("num_microbatches") or ())) > 1 for v in ran.values())


def _bars(axes: Any, groups: Sequence[_Group], names: Sequence[str], key: str, title: str) -> None:
    bar = 0.8 / len(names)
    longest = 1.0
    for number, name in enumerate(names):
        label: str | None = _label(name)
        for place, group in enumerate(groups):
            y = place - 0.4 + (number + 0.5) * bar
            value = (group.ran.get(name) or {}).get(key)
            base = _base(group, key)
            if not value or not base:
                axes.barh(y, 0.12, 0.9 * bar, color="white", edgecolor="#b0b0b0", hatch="////")
                axes.text(0.14, y, "not run", va="center", fontsize=7, color="#777")
                continue
            share = value / base
            longest = max(longest, share)
            axes.barh(y, share, 0.9 * bar, color=_colour(name), label=label)
            label = None
            text = f"{share:.2f}   {_absolute(key, value)}"
            axes.text(share + 0.01, y, text, va="center", fontsize=7)
    axes.axvline(1.0, color="#444", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(groups)), [group.label for group in groups], fontsize=9)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xlim(0, 1.22 * longest)
    has_eager = all((group.ran.get("eager") or {}).get(key) for group in groups)
    unit = "eager training" if has_eager else "eager training (the largest where it did not run)"
    axes.set_xlabel(f"{title}, {unit} = 1")
    axes.spines[["top", "right"]].set_visible(False)


def _base(group: _Group, key: str) -> float | None:
    """Return eager's value, or the largest where eager did not run."""
    eager = (group.ran.get("eager") or {}).get(key)
    return eager or max((v.get(key) or 0 for v in group.ran.values()), default=None)


def _absolute(key: str, value: float) -> str:
    return f"{value:.0f} ms" if key == "step_ms" else format_bytes(value)


def _against_microbatches(axes: Any, group: _Group) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, variant in group.ran.items():
        by_count: dict[int, list[float]] = defaultdict(list)
        for count, ms in zip(variant["num_microbatches"], variant["step_ms_all"], strict=True):
            by_count[count].append(ms)
        counts = sorted(by_count)
        medians = [statistics.median(by_count[count]) for count in counts]
        axes.plot(counts, medians, marker="o", markersize=4, color=_colour(name))
    axes.set_title(f"{group.label}: ms a step", fontsize=10)
    axes.set_xlabel("microbatches of the step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def _title(documents: Sequence[Mapping[str, Any]]) -> str:
    devices = {str(d["device"]) for d in documents}
    counts = sorted({d["num_gpus"] or 0 for d in documents})
    gpus = " or ".join(str(count) for count in counts if count)
    versions = documents[0].get("versions") or {}
    packages = {
        "torch": "torch",
        "megatron_core": "Megatron-core",
        "transformer_engine": "Transformer Engine",
    }
    stack = [f"{text} {versions[name]}" for name, text in packages.items() if name in versions]
    return ", ".join([f"{gpus} {' or '.join(sorted(devices))}".strip(), *stack])
