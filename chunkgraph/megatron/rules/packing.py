"""The rules of packed documents."""

from __future__ import annotations

from collections.abc import Callable

from chunkgraph.settings.rule import Facts, Rule

__all__ = ["NUM_SEQS_RULE", "PACKING_FILE_RULES", "PACKING_RULES"]


def _packed(text: str, when: Callable[[Facts], object]) -> Rule:
    """Return a rule that applies only to packed documents."""
    return Rule(text, lambda f: f.packed and when(f))


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
