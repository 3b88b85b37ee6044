"""``chunkgraph packing``: find packed shapes for a dataset's documents; needs no torch."""

from __future__ import annotations

import argparse
import importlib.util
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chunkgraph._outputs import check_output, output_file, write_output
from chunkgraph._text import shorten, shown
from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.packing import (
    DocumentLengths,
    MicrobatchSizes,
    PackedShape,
    Recommendation,
    ShapeOutcome,
    fallback_share,
    fits,
    pack_in_order,
    quantile,
    read_lengths,
    recommend,
    sizes_of,
)
from chunkgraph.packing.offsets import MAX_TOKENS
from chunkgraph.packing.seq_counts import default_buckets_of_shape

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.console import Console

_DESCRIPTION = """\
Find how many sequences (N) and tokens (T) the graphs of a packed microbatch
should hold: the share of steps that would not fit and run eagerly, and the
share of rows that would be padding.

FILE is a Megatron dataset (its .idx file, or the path before it), a .npy array
of document lengths, or text with one length per line. Documents are shuffled
and packed end to end. A line of several lengths is one packed microbatch and is
used unchanged. N counts the dummy sequence that fills the tail.
"""
_DEFAULT_CAPACITY = 4096
_DEFAULT_MICROBATCHES = 8
# Kernels process tiles of this many rows.
_ROUND_TOKENS = 128
_QUANTILES = {"P50": 0.5, "P90": 0.9, "P99": 0.99, "max": 1.0}
# The table omits shapes with a larger fallback share than this.
_HOPELESS = 0.95
# Shorter lengths are worth their graphs if they save this share of all rows.
_WORTH = 0.01
_LENGTH_BUCKETS = (0.25, 0.5)


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "packing",
        help="shapes for packed sequences, from a dataset's lengths; needs no torch",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="document lengths, see above")
    parser.add_argument(
        "--target-fallback",
        metavar="SHARE",
        default="1%",
        help="share of steps that may run eagerly: 1%% or 0.01 (default 1%%)",
    )
    parser.add_argument(
        "--max-packed-tokens",
        type=int,
        metavar="T",
        help="tokens that a microbatch is packed with, over all context-parallel ranks; longer "
        "documents are cut (default: the power of two above the longest document or "
        f"{_DEFAULT_CAPACITY}; of packed microbatches, the largest)",
    )
    parser.add_argument(
        "--global-batch-size",
        type=int,
        metavar="G",
        default=_DEFAULT_MICROBATCHES,
        help="packed microbatches of a step on all data-parallel ranks; one that does not fit "
        f"makes the step eager (default {_DEFAULT_MICROBATCHES})",
    )
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        metavar="C",
        default=1,
        help="pad each document to a multiple of 2 C rows (default 1: not at all)",
    )
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="draw eager steps against N (.png, .svg or .pdf)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand.

    Returns:
        The exit code: 0, or 1 when no shape meets the target.

    Raises:
        ConfigError: The arguments or the file are wrong, or the picture cannot be written.
        MissingDependencyError: The picture needs matplotlib.
        OutputError: Writing the picture failed.
    """
    from rich.console import Console

    target = _share(args.target_fallback)
    for name in ("global_batch_size", "context_parallel_size"):
        if (value := getattr(args, name)) < 1:
            raise ConfigError(f"packing: --{name.replace('_', '-')} {value} is below 1")
    if args.plot is not None:
        _check_picture(args.plot)
    with Console(stderr=True).status(f"reading {shown(str(args.file))}"):
        lengths = read_lengths(args.file)
        if (most := args.max_packed_tokens) is None:
            most = _default_capacity(lengths, args.context_parallel_size)
        capacity = PackedShape(
            max_packed_seqs=2,
            max_packed_tokens=most,
            context_parallel_size=args.context_parallel_size,
        )
        sizes = _microbatches(lengths, capacity)
        result = recommend(
            sizes, capacity, microbatches_per_step=args.global_batch_size, target=target
        )
    if args.plot is not None:
        write_output("--plot", args.plot, _drawn(sizes, result, args, target))
    console = Console(highlight=False, markup=False)
    console.print(shorten(str(args.file)), style="bold", soft_wrap=True)
    what = "cut" if lengths.microbatch_ends is None else "never fit"
    parts = {
        "Documents" + " (of the beginning)" * lengths.is_partial: len(lengths.tokens),
        "empty, left out": lengths.num_empty,
        f"longer than {most} tokens, {what}": int((lengths.tokens > most).sum()),
    }
    console.print("; ".join(f"{name}: {number}" for name, number in parts.items() if number))
    console.print(
        f"Microbatches of up to {most} tokens: {len(sizes)}; in a step: {args.global_batch_size}"
    )
    _print_tables(console, lengths, sizes, result)
    if result.best is None:
        console.print(
            f"No shape of up to {most} tokens keeps eager steps at or below {_percent(target)}. "
            "Raise --max-packed-tokens, or the target.",
            style="bold",
        )
        return 1
    _print_recommendation(console, result, target)
    padding = f"{_percent(result.best.padding_waste)} of the rows are padding"
    console.print(
        f"{_percent(result.best.fallback_share)} of the steps run eagerly, target "
        f"{_percent(target)}. {padding}, {_percent(result.best.bucketed_waste)} with length "
        "buckets."
    )
    if result.num_allowed_misfits == 0 and target > 0:
        console.print(
            f"The dataset is too small to distinguish {_percent(target)} of the steps from none: "
            "the shape holds every microbatch."
        )
    return 0


def _microbatches(lengths: DocumentLengths, capacity: PackedShape) -> MicrobatchSizes:
    tokens, ends = lengths.tokens, lengths.microbatch_ends
    if ends is None:
        tokens = np.minimum(tokens, capacity.max_packed_tokens)
        tokens = np.random.default_rng(0).permutation(tokens)
        ends = pack_in_order(tokens, capacity)
    return sizes_of(tokens, ends, capacity)


def _share(text: str) -> float:
    """Parse ``1%`` or ``0.01`` as a number below 1."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ConfigError(
            f"packing: --target-fallback {shown(text)} is not a share below 1. Write a percentage, "
            "such as 1%, or a fraction, such as 0.01"
        )
    return value


def _default_capacity(lengths: DocumentLengths, num_ranks: int) -> int:
    multiple = 1 if num_ranks == 1 else 2 * num_ranks
    # The user set no size, so limit the default to what offsets can count.
    most = MAX_TOKENS // multiple * multiple
    if lengths.microbatch_ends is not None:
        padded = -(-lengths.tokens // multiple) * multiple
        totals = np.concatenate([[0], np.cumsum(padded)])[lengths.microbatch_ends]
        unit = math.lcm(_ROUND_TOKENS, multiple)
        return min(most, -(-int(np.diff(totals, prepend=0).max()) // unit) * unit)
    longest = max(_DEFAULT_CAPACITY, int(lengths.tokens.max()))
    power = 1 << (longest - 1).bit_length()
    return min(most, -(-power // multiple) * multiple)


def _print_tables(
    console: Console, lengths: DocumentLengths, sizes: MicrobatchSizes, result: Recommendation
) -> None:
    from rich import box
    from rich.table import Table

    spread = Table("", *_QUANTILES, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, values in {
        "Tokens of a document": lengths.tokens,
        "Documents of a microbatch": sizes.num_documents,
        "Tokens of a microbatch": sizes.num_tokens,
    }.items():
        spread.add_row(name, *(str(quantile(values, q)) for q in _QUANTILES.values()))
    headings = ("Sequences N", "Tokens T", "Misfits", "Eager steps", "Padding", "In buckets", "")
    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in (*spread.columns[1:], *table.columns):
        column.justify = "right"
    for outcome in _telling(result):
        is_best = outcome is result.best
        table.add_row(
            str(outcome.shape.max_packed_seqs),
            str(outcome.shape.max_packed_tokens),
            str(outcome.num_misfits),
            _percent(outcome.fallback_share),
            _percent(outcome.padding_waste),
            _percent(outcome.bucketed_waste),
            "<-" if is_best else "",
            style="bold" if is_best else None,
        )
    console.print(spread, table)


def _telling(result: Recommendation) -> Sequence[ShapeOutcome]:
    """Choose the rows: each N that changes something, for the recommended T, or for the largest."""
    shape = (result.best or result.outcomes[-1]).shape
    rows: list[ShapeOutcome] = []
    for outcome in result.outcomes:
        if outcome.shape.max_packed_tokens != shape.max_packed_tokens:
            continue
        is_new = not rows or rows[-1].num_misfits != outcome.num_misfits
        if outcome is result.best or (is_new and outcome.fallback_share <= _HOPELESS):
            rows.append(outcome)
    # The least bad row is more useful than an empty table.
    return rows or [min(result.outcomes, key=lambda outcome: outcome.fallback_share)]


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    # Rounding must not make a rare event look impossible.
    return "<0.01%" if 0 < share < 0.0001 else f"{share:.2%}"


def _print_recommendation(console: Console, result: Recommendation, target: float) -> None:
    best = result.best
    assert best is not None
    shape, plain, bucketed = best.shape, best.padding_waste, best.bucketed_waste
    values: dict[str, Sequence[float]] = {
        "max-packed-seqs": [shape.max_packed_seqs],
        "max-packed-tokens": [shape.max_packed_tokens],
    }
    if plain is not None and bucketed is not None and bucketed <= plain - _WORTH:
        values["packed-buckets"] = _LENGTH_BUCKETS
    flags = " ".join(f"--cuda-graph-{name} {_words(n)}" for name, n in values.items())
    console.print(f"Recommended:\n  {flags}", style="bold", soft_wrap=True)
    fewest = min(
        one.shape.max_packed_seqs
        for one in result.outcomes
        if one.shape.max_packed_tokens == shape.max_packed_tokens and one.fallback_share <= target
    )
    raised = ""
    if fewest < shape.max_packed_seqs:
        raised = f", and attention takes no longer for {shape.max_packed_seqs}"
    console.print(
        f"Reason: {fewest} sequences are the fewest that keep eager steps at or below "
        f"{_percent(target)}{raised}. No other T pads 1% less."
    )
    if captured := default_buckets_of_shape(shape, values.get("packed-buckets", ())):
        console.print(f"Graphs for fewer sequences are captured too: {_words(captured)}.")


def _words(values: Iterable[float]) -> str:
    return " ".join(map(str, values))


def _check_picture(path: Path) -> None:
    """Check before the work that a picture can be drawn and written."""
    check_output("--plot", path)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {shown(str(path))}: the name must end in .png, .svg or .pdf.")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "matplotlib is not installed, but --plot needs it. Install it with: "
            "pip install 'chunkgraph[plot]'"
        )


def _drawn(
    sizes: MicrobatchSizes, result: Recommendation, args: argparse.Namespace, target: float
) -> bytes:
    """Draw eager steps against N, a curve for each T, and mark the recommended shape."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    per_step, best = args.global_batch_size, result.best
    largest = max(4, *(outcome.shape.max_packed_seqs for outcome in result.outcomes))
    points = np.unique(np.geomspace(2, largest, num=160).astype(int)).tolist()
    shapes = {outcome.shape.max_packed_tokens: outcome.shape for outcome in result.outcomes}
    for tokens, shape in sorted(shapes.items()):
        misfits = [int((~fits(sizes, replace(shape, max_packed_seqs=n))).sum()) for n in points]
        shares = [100 * fallback_share(n, len(sizes), per_step) for n in misfits]
        axes.plot(points, shares, label=f"T = {tokens}")
    if best is not None:
        seqs, tokens = best.shape.max_packed_seqs, best.shape.max_packed_tokens
        label = f"recommended: N = {seqs}, T = {tokens}"
        axes.plot([seqs], [100 * best.fallback_share], "ko", label=label)
    axes.axhline(100 * target, color="black", linestyle=":", label=f"target: {100 * target:.4g}%")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_title(f"{len(sizes)} microbatches, {per_step} in a step", fontsize=10)
    axes.set_ylabel("steps that run eagerly, %")
    axes.set_xlabel("sequences N of a microbatch, including the dummy")
    # Below the axes, no curve passes through it.
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format=args.plot.suffix.lower().removeprefix("."))
    return content.getvalue()
