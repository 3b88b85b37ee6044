"""Draw the picture of ``chunkgraph packing``: eager steps against N, and microbatch contents."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chunkgraph._outputs import can_be_rewritten, check_output, write_output
from chunkgraph._text import shorten
from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.packing import fallback_share, fits, quantile

if TYPE_CHECKING:
    from chunkgraph.packing.study import PackingStudy

__all__ = ["check_picture", "draw"]

_CHOSEN = "#d1495b"
_RIGHT_PART = 0.8
"""Share of the logarithmic axis beyond which labels are placed left of their point."""
_GREYS = ("#b0b0b0", "#8a8a8a", "#606060", "#303030")
_NUM_POINTS = 160
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


def draw(study: PackingStudy, path: Path) -> None:
    """Draw the study into a file.

    Raises:
        ConfigError: The study cannot be drawn.
        OutputError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    steps, held = figure.subplots(1, 2)
    _draw_steps(steps, study)
    _draw_held(held, study)
    name = Path(study.path).name
    figure.suptitle(
        f"{name}: {len(study.sizes)} microbatches, {study.microbatches_per_step} in a step",
        fontsize=10,
    )
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    """Write a matplotlib figure; as PNG if the name has no known ending."""
    ending = path.suffix.lower()
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=150, format=ending[1:] if ending in _ENDINGS else "png")
    except ValueError as error:
        msg = f"--plot {shorten(str(path))}: cannot be drawn: {shorten(str(error))}."
        raise ConfigError(msg) from None
    write_output("--plot", path, content.getvalue())


def _draw_steps(axes: Any, study: PackingStudy) -> None:
    best = study.result.best
    largest = int(study.sizes.num_documents.max()) + 1
    points = np.unique(np.geomspace(2, max(largest, 4), _NUM_POINTS).astype(int)).tolist()
    capacities = sorted({o.shape.max_packed_tokens for o in study.result.outcomes})
    for position, tokens in enumerate(capacities):
        is_best = best is not None and tokens == best.shape.max_packed_tokens
        axes.plot(
            points,
            [100 * _share(study, num_seqs, tokens) for num_seqs in points],
            color=_CHOSEN if is_best else _GREYS[position % len(_GREYS)],
            linewidth=2 if is_best else 1,
            zorder=3 if is_best else 2,
            label=f"T = {tokens}",
        )
    label = f"target, {100 * study.target:.4g}%"
    axes.axhline(100 * study.target, color="black", linewidth=0.8, linestyle=":", label=label)
    if best is not None:
        num_seqs, share = best.shape.max_packed_seqs, 100 * best.fallback_share
        axes.plot([num_seqs], [share], marker="o", color=_CHOSEN, zorder=4)
        axes.annotate(
            f"N = {num_seqs}",
            (num_seqs, share),
            textcoords="offset points",
            fontsize=9,
            color=_CHOSEN,
            **_inside(num_seqs, largest, (4, 8)),
        )
    _style_counts(axes, largest)
    axes.set_ylim(-2, 102)
    axes.set_title("steps that run eagerly, %", fontsize=10)
    axes.set_xlabel("sequences N that a microbatch holds, the dummy included")
    axes.legend(fontsize=8, frameon=False)


def _share(study: PackingStudy, num_seqs: int, tokens: int) -> float:
    limit = study.capacity.max_document_tokens
    shape = replace(
        study.capacity,
        max_packed_seqs=num_seqs,
        max_packed_tokens=tokens,
        max_document_tokens=None if limit is None else min(limit, tokens),
    )
    num_misfits = int((~fits(study.sizes, shape)).sum())
    return fallback_share(num_misfits, len(study.sizes), study.microbatches_per_step)


def _draw_held(axes: Any, study: PackingStudy) -> None:
    counts = np.sort(study.sizes.num_documents)
    shares = 100 * np.arange(1, len(counts) + 1) / len(counts)
    axes.step(counts, shares, where="post", color=_GREYS[3], linewidth=1)
    for q in (0.5, 0.9, 0.99):
        value = quantile(counts, q)
        axes.plot([value], [100 * q], marker="o", markersize=4, color=_GREYS[3])
        axes.annotate(
            f"P{100 * q:g}: {value}",
            (value, 100 * q),
            textcoords="offset points",
            fontsize=8,
            **_inside(value, int(counts[-1]) + 1, (6, -11)),
        )
    _style_counts(axes, int(counts[-1]) + 1)
    axes.set_ylim(-2, 102)
    axes.set_title("microbatches with at most so many documents, %", fontsize=10)
    axes.set_xlabel("documents of a microbatch")


def _inside(position: float, largest: int, offset: tuple[int, int]) -> dict[str, Any]:
    """Place a label right of a point, or left of it if the label would leave the axes."""
    is_left = position > max(largest, 2) ** _RIGHT_PART
    return {"xytext": (-offset[0], offset[1]), "ha": "right"} if is_left else {"xytext": offset}


def _style_counts(axes: Any, largest: int) -> None:
    from matplotlib.ticker import FormatStrFormatter, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_xlim(1, 1.15 * max(largest, 2))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
