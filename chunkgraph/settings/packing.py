"""The section ``packing`` and its rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.packing.offsets import MAX_TOKENS
from chunkgraph.settings.rule import Facts, Rule
from chunkgraph.settings.setting import NOT_NEGATIVE, POSITIVE, setting

__all__ = ["NUM_SEQS_RULE", "PACKING_FILE_RULES", "PACKING_RULES", "PackingConfig"]


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Documents of any length, packed into microbatches of one shape without mixing."""

    max_packed_seqs: int = setting(
        0,
        help="Sequences per packed microbatch: its documents, and one for the remaining tokens. A "
        "step with more documents in a microbatch runs eagerly. 0: no packing.",
        bounds=NOT_NEGATIVE,
        flag="--cuda-graph-max-packed-seqs",
    )
    max_packed_tokens: int | None = setting(
        None,
        help="Rows per packed microbatch; with context_parallel_sizes, rows per rank. Null: "
        "model.seq_length.",
        bounds=POSITIVE,
        flag="--cuda-graph-max-packed-tokens",
        needs="packing.max_packed_seqs",
    )
    max_document_tokens: int | None = setting(
        None,
        help="Tokens of the longest document. A step with a longer one runs eagerly. Kernels "
        "receive the limit, which does not make cuDNN's attention faster; the remaining tokens "
        "then take more sequences, in addition to max_packed_seqs. Null: all rows.",
        bounds=POSITIVE,
        flag="--cuda-graph-max-document-tokens",
        needs="packing.max_packed_seqs",
    )
    pad_seq_to_mult: int = setting(
        1,
        help="Pad each document to a multiple of this many rows. With the block size of Mamba's "
        "kernels (Megatron: 128), documents do not affect each other's last bits, at the cost of "
        "half a block of padding per document on average.",
        bounds=POSITIVE,
        needs="packing.max_packed_seqs",
    )
    buckets: tuple[float, ...] = setting(
        (),
        help="Shorter microbatches to capture as well, as fractions of the rows or as numbers of "
        "rows above 1. Each microbatch uses the smallest that holds it.",
        bounds=POSITIVE,
        flag="--cuda-graph-packed-buckets",
        needs="packing.max_packed_seqs",
    )
    seq_buckets: tuple[int, ...] | None = setting(
        None,
        help="Smaller sequence counts to capture as well. Each microbatch uses the smallest that "
        "holds its documents, because attention takes time for empty sequences too. Null: powers "
        "of two from 64 to half of max_packed_seqs, and 32 where the shortest microbatch has at "
        "most 1024 rows per rank. Empty: none.",
        flag="--cuda-graph-packed-seq-buckets",
        needs="packing.max_packed_seqs",
    )
    context_parallel_sizes: tuple[int, ...] = setting(
        (),
        help="Numbers of data-parallel ranks that may share a microbatch, powers of two. Each "
        "microbatch uses one of them. A step takes the documents that num_microbatches full "
        "microbatches hold, and its schedule decides how many microbatches they become. Empty: no "
        "sharing.",
        flag="--cuda-graph-cp-sizes",
        needs="packing.max_packed_seqs",
    )
    context_parallel_schedule: Literal["smallest", "random"] = setting(
        "smallest",
        help="How to choose a microbatch's size: the smallest that holds its documents (smallest), "
        "or one at random by train.seed, to exercise all graphs (random).",
        flag="--cuda-graph-cp-schedule",
        needs="packing.context_parallel_sizes",
    )
    captured_context_parallel_sizes: tuple[int, ...] = setting(
        (),
        help="The context_parallel_sizes to capture; steps with any other size run eagerly. "
        "Empty: all.",
        flag="--cuda-graph-cp-captured-sizes",
        needs="packing.context_parallel_sizes",
    )


def _rows(f: Facts) -> int:
    """Return the rows of a microbatch on all its context-parallel ranks together."""
    return int(f.max_packed_tokens or f.seq_length)


def _rule(
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
    _rule(
        "seq_buckets max_packed_seqs: {count} is not between 2 and {max_packed_seqs=} - 1; leave "
        "it out",
        _wrong_counts,
    ),
)
"""Rules of packed documents, from a file, a program or a command line."""


def _least_rows(f: Facts) -> int:
    """Return the fewest rows of a document."""
    size = f.context_parallel_size
    return math.lcm(1 if size == 1 else 2 * size, f.pad_seq_to_mult)


def _crowded(f: Facts) -> object:
    most, least, rows = (f.document_counts or (0,))[-1], _least_rows(f), _rows(f)
    return most * least > rows and {"most": most, "least": least, "rows": rows}


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


PACKING_FILE_RULES = (
    NUM_SEQS_RULE,
    _rule(
        "max_packed_seqs max_packed_tokens seq_length: offsets of packed documents are int32 and "
        f"end at {MAX_TOKENS}; lower the larger ones",
        lambda f: max(f.max_packed_seqs, _rows(f)) > MAX_TOKENS,
    ),
    _rule(
        "max_packed_tokens context_parallel_size pad_seq_to_mult: the {rows} rows (default: "
        "{seq_length}) are not divisible by {parts}: each context-parallel rank holds two pieces "
        "of every document, tensor-parallel ranks split the rows with sequence parallelism "
        "({tensor_model_parallel_size}, {sequence_parallel}), and documents are padded to "
        "multiples; use {nearest} rows",
        _uneven_rows,
        TopologyError,
    ),
    _rule(
        "max_document_tokens context_parallel_sizes: the largest size limits the documents; leave "
        "the former out",
        lambda f: f.max_document_tokens is not None and f.context_parallel_sizes,
    ),
    _rule(
        "max_document_tokens: a microbatch has {rows} tokens; leave it out, or lower it",
        lambda f: (f.max_document_tokens or 0) > _rows(f) and {"rows": _rows(f)},
    ),
    _rule(
        "document_counts: {most} documents do not fit in the {rows} rows of a microbatch, since "
        "each takes at least {least}; lower the last number",
        _crowded,
    ),
    _rule(
        "buckets: {size} is neither a fraction above 0 and up to 1, nor a whole number of rows up "
        "to {rows}; change it",
        _wrong_buckets,
    ),
    _rule(
        "micro_batch_size max_packed_seqs: a packed microbatch is one row of documents; use "
        "{micro_batch_size=1} and a larger {max_packed_tokens=}",
        lambda f: f.micro_batch_size != 1,
    ),
    _rule(
        "layer_spec device max_packed_seqs: Megatron's local attention does not support packed "
        "sequences; use {layer_spec=transformer_engine} on a GPU, or your own layer spec "
        "(package.module:function) with an attention that does",
        lambda f: f.layer_spec == "local" or (f.layer_spec, f.device) == ("auto", "cpu"),
    ),
    _rule(
        "max_packed_tokens seq_length: learned positions end at the latter; lower the former or "
        "raise the latter",
        lambda f: f.position_embedding_type == "learned_absolute" and _rows(f) > f.seq_length,
    ),
)
"""Rules of a configuration file."""
