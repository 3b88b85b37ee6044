"""Draw the picture of ``chunkgraph packing``: eager steps against N."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import replace
from pathlib import Path

import numpy as np

from chunkgraph._outputs import can_be_rewritten, check_output, write_output
from chunkgraph._text import shorten
from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.packing import MicrobatchSizes, Recommendation, fallback_share, fits

__all__ = ["check_picture", "draw"]

_CHOSEN = "#d1495b"
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
        raise ConfigError(
            f"--plot {shorten(str(path))}: the file's name must end in .png, .svg or .pdf."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "matplotlib is not installed, but --plot needs it. Install it with: "
            "pip install 'chunkgraph[plot]'"
        )


def draw(
    sizes: MicrobatchSizes,
    result: Recommendation,
    path: Path,
    microbatches_per_step: int,
    target: float,
) -> None:
    """Draw a curve for each token capacity, and mark the recommended shape.

    Raises:
        ConfigError: The picture cannot be drawn.
        OutputError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, NullFormatter

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    best = result.best
    largest = max(4, *(outcome.shape.max_packed_seqs for outcome in result.outcomes))
    points = np.unique(np.geomspace(2, largest, _NUM_POINTS).astype(int)).tolist()
    shapes = {outcome.shape.max_packed_tokens: outcome.shape for outcome in result.outcomes}
    for position, (tokens, shape) in enumerate(sorted(shapes.items())):
        is_best = best is not None and tokens == best.shape.max_packed_tokens
        misfits = [int((~fits(sizes, replace(shape, max_packed_seqs=n))).sum()) for n in points]
        axes.plot(
            points,
            [100 * fallback_share(n, len(sizes), microbatches_per_step) for n in misfits],
            color=_CHOSEN if is_best else _GREYS[position % len(_GREYS)],
            linewidth=2 if is_best else 1,
            zorder=3 if is_best else 2,
            label=f"T = {tokens}",
        )
    if best is not None:
        axes.plot(
            [best.shape.max_packed_seqs],
            [100 * best.fallback_share],
            marker="o",
            linestyle="",
            color=_CHOSEN,
            zorder=4,
            label=f"recommended: N = {best.shape.max_packed_seqs}",
        )
    label = f"target: {100 * target:.4g}%"
    axes.axhline(100 * target, color="black", linewidth=0.8, linestyle=":", label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(-2, 102)
    axes.set_title(f"{len(sizes)} microbatches, {microbatches_per_step} in a step", fontsize=10)
    axes.set_ylabel("steps that run eagerly, %")
    axes.set_xlabel("sequences N of a microbatch, including the dummy")
    axes.legend(fontsize=8, frameon=False)
    ending = path.suffix.lower()
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=150, format=ending[1:] if ending in _ENDINGS else "png")
    except ValueError as error:
        raise ConfigError(
            f"--plot {shorten(str(path))}: cannot be drawn: {shorten(str(error))}."
        ) from None
    write_output("--plot", path, content.getvalue())
