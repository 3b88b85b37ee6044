"""Print the results of ``chunkgraph packing``: tables for people, or one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chunkgraph._outputs import stream_next_to
from chunkgraph.packing import LongDocuments, ShapeOutcome, evaluate, quantile
from chunkgraph.packing.seq_counts import (
    MOST_MICROBATCHES,
    default_buckets_of_shape,
    largest_count_with_same_launch,
    recommended_seq_buckets,
)

if TYPE_CHECKING:
    from rich.table import Table

    from chunkgraph.packing.study import PackingStudy

__all__ = ["as_json", "flags", "print_study"]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LONG = {
    LongDocuments.TRUNCATE: "cut to it",
    LongDocuments.SPLIT: "split",
    LongDocuments.KEEP: "kept: their steps fall back",
}
# The table omits shapes with a larger fallback share than this, unless requested.
_HOPELESS = 0.95
# Shorter lengths are worth their graphs if they save this share of all rows.
_WORTH = 0.01
_WIDTH = 80
# Lists with more counts than this before the last one are abbreviated.
_MANY_COUNTS = 2


def as_json(study: PackingStudy) -> dict[str, Any]:
    """Return everything as plain values; shares are from 0 to 1."""
    lengths, sizes, best = study.lengths, study.sizes, study.result.best
    return {
        "path": study.path,
        "source": lengths.source,
        "num_documents": len(lengths.tokens),
        "num_empty_documents": lengths.num_empty,
        "num_documents_above_capacity": study.num_long,
        "long_documents": study.long_documents.value,
        "capacity_tokens": study.capacity.max_packed_tokens,
        "max_document_tokens": study.capacity.max_document_tokens,
        "context_parallel_size": study.capacity.context_parallel_size,
        "pad_seq_to_mult": study.capacity.pad_seq_to_mult,
        "num_microbatches": len(sizes),
        "microbatches_per_step": study.microbatches_per_step,
        "target_fallback_share": study.target,
        "document_tokens": _spread(lengths.tokens),
        "documents_per_microbatch": _spread(sizes.num_documents),
        "tokens_per_microbatch": _spread(sizes.num_tokens),
        "candidates": [_outcome_json(outcome) for outcome in study.result.outcomes],
        "recommended": None if best is None else _outcome_json(best),
        "flags": None if best is None else flags(best),
        "seq_buckets": None if best is None else recommended_seq_buckets(sizes, best.shape),
        "default_seq_buckets": None if best is None else list(default_buckets_of_shape(best.shape)),
    }


def _spread(values: NDArray[np.int64]) -> dict[str, int]:
    return {
        **{name: quantile(values, q) for name, q in _QUANTILES.items()},
        "max": int(values.max()),
    }


def _outcome_json(outcome: ShapeOutcome) -> dict[str, Any]:
    return {
        "max_packed_seqs": outcome.shape.max_packed_seqs,
        "max_packed_tokens": outcome.shape.max_packed_tokens,
        "num_misfits": outcome.num_misfits,
        "fallback_share": outcome.fallback_share,
        "padding_waste": outcome.padding_waste,
        "bucketed_padding_waste": outcome.bucketed_waste,
    }


def flags(outcome: ShapeOutcome) -> list[str] | None:
    """Return the flags that select a shape in a pretrain script; None if no flags can."""
    if outcome.shape.pad_seq_to_mult > 1:
        return None
    limit = outcome.shape.max_document_tokens
    return [
        *("--cuda-graph-max-packed-seqs", str(outcome.shape.max_packed_seqs)),
        *("--cuda-graph-max-packed-tokens", str(outcome.shape.max_packed_tokens)),
        *(() if limit is None else ("--cuda-graph-max-document-tokens", str(limit))),
    ]


def print_study(study: PackingStudy, plot: Path | None) -> None:
    """Print the tables and the recommendation."""
    from rich.console import Console

    console = Console(file=stream_next_to(plot), highlight=False)

    def write(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    lengths = study.lengths
    write(f"{study.path}: {len(lengths.tokens)} documents ({lengths.source})", "bold")
    if lengths.num_empty:
        write(f"{lengths.num_empty} empty documents were left out")
    capacity = study.capacity.max_packed_tokens
    if study.is_default_capacity and lengths.microbatch_ends is None:
        write(f"No --max-packed-tokens: microbatches are packed with up to {capacity} tokens")
    if study.num_long:
        write(f"{study.num_long} documents of more than {study.capacity.document_limit} tokens: "
            f"{_LONG[study.long_documents]}")  # fmt: skip
    write(f"{len(study.sizes)} microbatches of up to {capacity} tokens, "
        f"{study.microbatches_per_step} in a step")  # fmt: skip
    console.print(_spread_table(study))
    console.print(_outcome_table(study))
    _print_recommendation(study, write)
    if plot is not None:
        write(f"Drawn in {plot}")


def _spread_table(study: PackingStudy) -> Table:
    rows = {
        "Tokens of a document": study.lengths.tokens,
        "Documents of a microbatch": study.sizes.num_documents,
        "Tokens of a microbatch": study.sizes.num_tokens,
    }
    table = _table(("", "P50", "P90", "P99", "max"))
    for name, values in rows.items():
        table.add_row(name, *map(str, _spread(values).values()))
    return table


def _outcome_table(study: PackingStudy) -> Table:
    table = _table(
        ("Sequences N", "Tokens T", "Misfits", "Eager steps", "Padding", "In buckets", "")
    )
    for outcome in _shown(study):
        is_best = outcome is study.result.best
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
    return table


def _shown(study: PackingStudy) -> Sequence[ShapeOutcome]:
    """Choose the rows: each N that changes something, for capacities that can meet the target."""
    outcomes = study.result.outcomes
    usable = {o.shape.max_packed_tokens for o in outcomes if o.fallback_share <= study.target}
    shown: list[ShapeOutcome] = []
    for outcome in outcomes:
        tokens = outcome.shape.max_packed_tokens
        before = shown[-1] if shown else None
        is_more_of_the_same = (
            before is not None
            and before.shape.max_packed_tokens == tokens
            and before.num_misfits == outcome.num_misfits
        )
        is_telling = outcome.fallback_share <= _HOPELESS and not is_more_of_the_same
        is_requested = outcome.shape.max_packed_seqs in study.extra_seqs
        if (not usable or tokens in usable) and (is_telling or is_requested):
            shown.append(outcome)
    # The least bad row is more useful than an empty table.
    return shown or [min(outcomes, key=lambda outcome: outcome.fallback_share)]


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    # Rounding must not make a rare event look impossible.
    return "<0.01%" if 0 < share < 0.0001 else f"{share:.2%}"


def _print_recommendation(study: PackingStudy, write: Any) -> None:
    best = study.result.best
    target = f"{100 * study.target:.4g}%"
    if best is None:
        limit = study.capacity.max_document_tokens
        raised = "--max-packed-tokens" if limit is None else "--max-document-tokens"
        write(
            f"No shape of up to {study.capacity.max_packed_tokens} tokens keeps eager steps at or\n"
            f"below {target}. Raise {raised}, or the target.",
            "bold",
        )
        return
    tokens = best.shape.max_packed_tokens
    keys = [f"packing.max_packed_seqs={best.shape.max_packed_seqs}"]
    keys.append(f"packing.max_packed_tokens={tokens}")
    if best.shape.max_document_tokens is not None:
        keys.append(f"packing.max_document_tokens={best.shape.max_document_tokens}")
    names = flags(best)
    if names is None:
        keys.append(f"packing.pad_seq_to_mult={best.shape.pad_seq_to_mult}")
        write(_lines("Recommended for chunkgraph train:", keys), "bold")
        write("Pretrain scripts (--sft) do not pad their documents this way: for them\n"
            "leave out --pad-seq-to-mult")  # fmt: skip
    else:
        pairs = zip(names[::2], names[1::2], strict=True)
        write(_lines("Recommended:", [f"{n} {v}" for n, v in pairs]), "bold")
        write(_lines("For chunkgraph train:", keys))
    write(f"T defaults to the sequence length: leave it out if that is {tokens}")
    write(f"{_percent(best.fallback_share)} of the steps run eagerly (target {target})")
    _print_same_cost(study, best, write)
    write(f"{_percent(best.padding_waste)} of the rows are padding")
    plain, bucketed = best.padding_waste, best.bucketed_waste
    if plain is not None and bucketed is not None and bucketed <= plain - _WORTH:
        options = _flag_and_key(
            best, "--cuda-graph-packed-buckets 0.25 0.5", "packing.buckets=[0.25,0.5]"
        )
        write(f"{_percent(best.bucketed_waste)} with {' '.join(options)}")
        more = sorted(
            {*default_buckets_of_shape(best.shape, (0.25, 0.5))}
            - {*default_buckets_of_shape(best.shape)}
        )
        if more:
            write(f"By default there are then graphs for {_and(more)} sequences too")
    _print_seq_buckets(study, best, write)
    if study.result.num_allowed_misfits == 0 and study.target > 0:
        write(
            f"{len(study.sizes)} microbatches are too few to distinguish {target} of the steps\n"
            "from none: the shape holds all of them"
        )


def _lines(head: str, parts: Sequence[str]) -> str:
    """Join the parts, in as many lines as they need."""
    lines = [head]
    for part in parts:
        if len(lines[-1]) + 1 + len(part) > _WIDTH:
            lines.append(part)
        else:
            lines[-1] += f" {part}"
    return "\n".join(lines)


def _print_same_cost(study: PackingStudy, best: ShapeOutcome, write: Any) -> None:
    """Print the result of the largest N with the same attention launch, if it is better."""
    same = largest_count_with_same_launch(best.shape)
    shape = replace(best.shape, max_packed_seqs=same)
    # This shape may not be among the candidates.
    other = evaluate(study.sizes, shape, study.microbatches_per_step)
    if other.num_misfits < best.num_misfits:
        write(
            f"{_percent(other.fallback_share)} with N = {same}, for which attention's kernels take "
            "as long"
        )


def _print_seq_buckets(study: PackingStudy, best: ShapeOutcome, write: Any) -> None:
    default, fewer = (
        default_buckets_of_shape(best.shape),
        recommended_seq_buckets(study.sizes, best.shape),
    )
    if default:
        write(
            f"By default there are graphs for {_and(default)} sequences too, so that few\n"
            "documents do not pay for many"
        )
    elif fewer:
        write("By default all graphs are for N sequences")
    if fewer == [0]:
        write(
            "Hardly any microbatch has so few documents: save these graphs with\n"
            + " ".join(
                _flag_and_key(best, "--cuda-graph-packed-seq-buckets 0", "packing.seq_buckets=[]")
            ),
            "bold",
        )
    elif fewer:
        needed = quantile(study.sizes.num_documents, MOST_MICROBATCHES)
        flag = f"--cuda-graph-packed-seq-buckets {' '.join(map(str, fewer))}"
        write(
            f"{MOST_MICROBATCHES:.0%} of the microbatches have at most {needed} documents. "
            "Cheaper for them:\n"
            + "\n".join(
                _flag_and_key(best, flag, f"packing.seq_buckets={str(fewer).replace(' ', '')}")
            ),
            "bold",
        )


def _flag_and_key(best: ShapeOutcome, flag: str, key: str) -> list[str]:
    """Return a pretrain script's flag and the configuration key, or the key alone."""
    return [key] if flags(best) is None else [flag, f"({key})"]


def _and(counts: Sequence[int]) -> str:
    *first, last = map(str, counts)
    if len(first) > _MANY_COUNTS:
        return f"{first[0]}, {first[1]}, ... {last}"
    return f"{', '.join(first)} and {last}" if first else last


def _table(headings: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    return table
