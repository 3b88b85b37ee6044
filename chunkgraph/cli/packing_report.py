"""What ``chunkgraph packing`` prints: tables for people, or one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chunkgraph.packing import LongDocuments, ShapeOutcome, quantile

if TYPE_CHECKING:
    from rich.table import Table

    from chunkgraph.cli.packing import PackingStudy

__all__ = ["as_json", "flags", "print_study"]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LONG = {
    LongDocuments.TRUNCATE: "cut to it",
    LongDocuments.SPLIT: "split",
    LongDocuments.KEEP: "kept: their steps fall back",
}
# In the table, rows with more steps than this falling back help no one.
_HOPELESS = 0.95
# Graphs for fewer sequences are worth having if these microbatches need less than one in so many.
_MANY, _FEW = 0.9, 2
# Transformer Engine rounds sequences up: to 32, to powers of two, from 512 on to multiples of it.
_LEAST_LAUNCHED, _LINEAR_FROM = 32, 512


def as_json(study: PackingStudy) -> dict[str, Any]:
    """Everything, as plain values; shares are 0 to 1."""
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
        "num_microbatches": len(sizes),
        "microbatches_per_step": study.microbatches_per_step,
        "target_fallback_share": study.target,
        "document_tokens": _spread(lengths.tokens),
        "documents_per_microbatch": _spread(sizes.num_documents),
        "tokens_per_microbatch": _spread(sizes.num_tokens),
        "candidates": [_outcome_json(outcome) for outcome in study.result.outcomes],
        "recommended": None if best is None else _outcome_json(best),
        "flags": None if best is None else flags(best),
        "seq_buckets": None if best is None else _seq_buckets(study, best),
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


def flags(outcome: ShapeOutcome) -> list[str]:
    """The flags of training that choose a shape."""
    limit = outcome.shape.max_document_tokens
    return [
        *("--cuda-graph-max-packed-seqs", str(outcome.shape.max_packed_seqs)),
        *("--cuda-graph-max-packed-tokens", str(outcome.shape.max_packed_tokens)),
        *(() if limit is None else ("--cuda-graph-max-document-tokens", str(limit))),
    ]


def _seq_buckets(study: PackingStudy, best: ShapeOutcome) -> list[int]:
    """Fewer sequences that are worth graphs of their own, or none."""
    # Kernels see the dummies of a limit on documents too.
    dummies = best.shape.num_sequences - best.shape.max_packed_seqs
    fewer = _as_launched(quantile(study.sizes.num_documents, _MANY) + 1 + dummies) - dummies
    return [fewer] if _FEW * fewer <= best.shape.max_packed_seqs else []


def _as_launched(num_seqs: int) -> int:
    """The most sequences for which attention's kernels are started as for ``num_seqs``.

    Transformer Engine's rule for cuDNN (``get_max_batch_size``), but for the smallest numbers.
    """
    if num_seqs <= _LEAST_LAUNCHED:
        return num_seqs
    if num_seqs > _LINEAR_FROM:
        return -(-num_seqs // _LINEAR_FROM) * _LINEAR_FROM
    return 1 << (num_seqs - 1).bit_length()


def print_study(study: PackingStudy, plot: Path | None) -> None:
    """Print the tables and the recommendation."""
    from rich.console import Console

    console = Console(highlight=False)

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    lengths = study.lengths
    say(f"{study.path}: {len(lengths.tokens)} documents ({lengths.source})", "bold")
    if lengths.num_empty:
        say(f"{lengths.num_empty} empty documents were left out")
    capacity = study.capacity.max_packed_tokens
    if study.is_default_capacity and lengths.microbatch_ends is None:
        say(f"No --max-packed-tokens: microbatches are packed with up to {capacity} tokens")
    if study.num_long:
        say(f"{study.num_long} documents of more than {study.capacity.document_limit} tokens: "
            f"{_LONG[study.long_documents]}")  # fmt: skip
    say(f"{len(study.sizes)} microbatches of up to {capacity} tokens, "
        f"{study.microbatches_per_step} in a step")  # fmt: skip
    console.print(_spread_table(study))
    console.print(_outcome_table(study))
    _say_recommendation(study, say)
    if plot is not None:
        say(f"Drawn in {plot}")


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
    """Rows that inform: of capacities that can meet the target, each N that changes something."""
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
        is_asked_for = outcome.shape.max_packed_seqs in study.wanted_seqs
        if (not usable or tokens in usable) and (is_telling or is_asked_for):
            shown.append(outcome)
    # A table of nothing says less than one row of the least bad.
    return shown or [min(outcomes, key=lambda outcome: outcome.fallback_share)]


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    # Rounding must not make a rare thing look impossible.
    return "<0.01%" if 0 < share < 0.0001 else f"{share:.2%}"


def _say_recommendation(study: PackingStudy, say: Any) -> None:
    best = study.result.best
    target = f"{100 * study.target:.4g}%"
    if best is None:
        limit = study.capacity.max_document_tokens
        raised = "--max-packed-tokens" if limit is None else "--max-document-tokens"
        say(
            f"No shape of up to {study.capacity.max_packed_tokens} tokens keeps eager steps at or\n"
            f"below {target}. Raise {raised}, or the target.",
            "bold",
        )
        return
    asked = flags(best)
    say(f"Recommended: {' '.join(asked[:4])}", "bold")
    if asked[4:]:
        say(" ".join(asked[4:]), "bold")
    say(
        f"For chunkgraph train: packing.max_packed_seqs={best.shape.max_packed_seqs} "
        f"packing.max_packed_tokens={best.shape.max_packed_tokens}"
        + (
            ""
            if best.shape.max_document_tokens is None
            else f"\npacking.max_document_tokens={best.shape.max_document_tokens}"
        )
    )
    say(f"{_percent(best.fallback_share)} of the steps run eagerly (target {target})")
    say(
        f"{_percent(best.padding_waste)} of the rows are padding, "
        f"{_percent(best.bucketed_waste)} with buckets of 1/4, 1/2 and 1 of T"
    )
    for fewer in _seq_buckets(study, best):
        say(
            f"{_MANY:.0%} of the microbatches have at most {fewer - 1} documents: with graphs for\n"
            f"these too, --cuda-graph-packed-seq-buckets {fewer} (chunkgraph train:\n"
            f"packing.seq_buckets=[{fewer}]), the room for more costs only the others"
        )
    if study.result.num_allowed_misfits == 0 and study.target > 0:
        say(
            f"{len(study.sizes)} microbatches are too few to tell {target} of the steps\n"
            "from none: the shape holds all of them"
        )


def _table(headings: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    return table
