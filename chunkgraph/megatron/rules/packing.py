"""The rules of packed documents."""

from __future__ import annotations

import math
from collections.abc import Callable

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.packing.offsets import MAX_TOKENS
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["NUM_SEQS_RULE", "PACKING_FILE_RULES", "PACKING_RULES"]


def _rows(f: Facts) -> int:
    """Return the rows of a microbatch on all its context-parallel ranks together."""
    return int(f.max_packed_tokens or f.seq_length)


def _packed(
    text: str, when: Callable[[Facts], object], error: type[ConfigError] = ConfigError
) -> Rule:
    """Return a rule that applies only to packed documents."""
    return Rule(text, lambda f: f.packed and when(f), error)


def _wrong_counts(f: Facts) -> object:
    counts = [n for n in f.seq_buckets or () if not 2 <= n < f.max_packed_seqs]
    return counts and {"count": counts[0]}


NUM_SEQS_RULE = Rule(
    "max_packed_seqs: one sequence takes the remaining rows; use 2 or more, or 0 for no packed "
    "sequences",
    lambda f: f.max_packed_seqs not in (None, 0) and f.max_packed_seqs < 2,
)
PACKING_RULES = (
    _packed(
        "seq_buckets max_packed_seqs: {count} is not between 2 and {max_packed_seqs=} - 1; leave "
        "it out",
        _wrong_counts,
    ),
)
"""Rules of packed documents, from a file, a program or a command line."""


def _least_rows(f: Facts) -> int:
    """Return the fewest rows of a document."""
    return 1 if f.context_parallel_size == 1 else 2 * int(f.context_parallel_size)


def _wrong_buckets(f: Facts) -> object:
    rows = _rows(f)
    sizes = [n for n in f.buckets if not 0 < n <= rows or (n > 1 and n != int(n))]
    return sizes and {"size": f"{sizes[0]:g}", "rows": rows}


def _uneven_rows(f: Facts) -> object:
    size, rows = f.context_parallel_size, _rows(f)
    parts = _least_rows(f)
    if f.sequence_parallel:
        parts = math.lcm(parts, size * f.tensor_model_parallel_size)
    below = rows // parts * parts
    nearest = f"{below} or {below + parts}" if below else f"{parts}"
    return rows % parts and {"rows": rows, "parts": parts, "nearest": nearest}


def _idle(name: str) -> Rule:
    return Rule(
        f"{name} max_packed_seqs: packing is off; leave the former out, or set the latter",
        lambda f: not f.max_packed_seqs and getattr(f, name),
    )


PACKING_FILE_RULES = (
    NUM_SEQS_RULE,
    *PACKING_RULES,
    *map(_idle, ("max_packed_tokens", "buckets", "seq_buckets", "context_parallel_sizes")),
    _packed(
        "max_packed_seqs max_packed_tokens seq_length: offsets of packed documents are int32 and "
        f"end at {MAX_TOKENS}; lower the larger ones",
        lambda f: max(f.max_packed_seqs, _rows(f)) > MAX_TOKENS,
    ),
    _packed(
        "max_packed_tokens context_parallel_size: the {rows} rows (default: {seq_length}) are not "
        "divisible by {parts}: each context-parallel rank holds two pieces of every document, and "
        "tensor-parallel ranks split the rows with sequence parallelism "
        "({tensor_model_parallel_size}, {sequence_parallel}); use {nearest} rows",
        _uneven_rows,
        TopologyError,
    ),
    _packed(
        "buckets: {size} is neither a fraction above 0 and up to 1, nor a whole number of rows up "
        "to {rows}; change it",
        _wrong_buckets,
    ),
    _packed(
        "micro_batch_size max_packed_seqs: a packed microbatch is one row of documents; use "
        "{micro_batch_size=1} and a larger {max_packed_tokens=}",
        lambda f: f.micro_batch_size != 1,
    ),
    _packed(
        "layer_spec device max_packed_seqs: Megatron's local attention does not support packed "
        "sequences; use {layer_spec=transformer_engine} on a GPU, or your own layer spec "
        "(package.module:function) with an attention that does",
        lambda f: f.layer_spec == "local" or (f.layer_spec, f.device) == ("auto", "cpu"),
    ),
)
"""Rules of a configuration file."""
