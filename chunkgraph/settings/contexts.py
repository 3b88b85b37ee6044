"""The rules of ``packing.context_parallel_sizes``: a size for each microbatch."""

from __future__ import annotations

from collections.abc import Callable

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["CONTEXT_FILE_RULES", "CONTEXT_RULES", "RANK_RULES", "SIZE_RULES"]


def _rule(
    text: str, when: Callable[[Facts], object], error: type[ConfigError] = ConfigError
) -> Rule:
    """Return a rule that applies only with ``context_parallel_sizes``."""
    return Rule(
        f"context_parallel_sizes {text}", lambda f: f.context_parallel_sizes and when(f), error
    )


def _recomputes(part: str) -> Callable[[Facts], bool]:
    return lambda f: f.recompute_granularity == "selective" and part in (f.recompute_modules or ())


CONTEXT_RULES = (
    _rule(
        "context_parallel_size: the groups are formed from the data-parallel ranks; use "
        "{context_parallel_size=1}",
        lambda f: (f.context_parallel_size or 1) > 1,
    ),
    _rule(
        "fp8: scales of ranks whose microbatches have several sizes are not supported; use one of "
        "them",
        lambda f: f.fp8,
    ),
    _rule(
        "mtp_num_layers: multi-token prediction sees only the rows on its rank; use one of them",
        lambda f: f.mtp_num_layers,
    ),
    _rule(
        "hybrid_layer_pattern: a Mamba mixer splits its heads over the ranks that it was built "
        "for; use one of them",
        lambda f: f.hybrid_layer_pattern,
    ),
    *(
        _rule(
            f"recompute_modules: {part} would be recomputed with the context-parallel group of "
            f"another microbatch; leave {part} out",
            _recomputes(part),
        )
        for part in ("moe", "mla_up_proj")
    ),
)
"""Rules of a model, from a file, a program or a command line."""


def _uneven_sizes(f: Facts) -> object:
    sizes = [size for size in f.context_parallel_sizes if size < 1 or size.bit_count() > 1]
    return sizes and {"size": sizes[0]}


def _uneven_parts(f: Facts) -> object:
    parts = f.tensor_model_parallel_size or 1 if f.sequence_parallel else 1
    parts *= 2 if max(f.context_parallel_sizes) > 1 and parts % 2 else 1
    return _rows(f) % parts and {"rows": _rows(f), "parts": parts}


def _rows(f: Facts) -> int:
    """Return the rows of a microbatch on one rank."""
    return f.max_packed_tokens or f.seq_length or 1


def _missing_sizes(f: Facts) -> object:
    missing = sorted(set(f.captured_context_parallel_sizes or ()) - set(f.context_parallel_sizes))
    return missing and {"missing": missing}


SIZE_RULES = (
    _rule(
        ": {size} is not a power of two, and groups of 1, 2, 4, ... neighbours share microbatches; "
        "leave it out",
        _uneven_sizes,
        TopologyError,
    ),
    Rule(
        "captured_context_parallel_sizes context_parallel_sizes: {missing} is not in the latter; "
        "add it there, or leave it out",
        lambda f: f.context_parallel_sizes and _missing_sizes(f),
    ),
)
"""Rules of the sizes themselves."""
RANK_RULES = (
    _rule(
        "data_parallel_size: groups of 1, 2, 4, ... neighbours need a power of two; change the "
        "number of data-parallel ranks",
        lambda f: (f.data_parallel_size or 1).bit_count() > 1,
        TopologyError,
    ),
    _rule(
        "data_parallel_size: the data-parallel ranks share microbatches and are too few for a size "
        "of {largest}; leave that size out, or use more ranks",
        lambda f: (
            f.data_parallel_size
            and max(f.context_parallel_sizes) > f.data_parallel_size
            and {"largest": max(f.context_parallel_sizes)}
        ),
        TopologyError,
    ),
    _rule(
        "max_packed_tokens: the {rows} rows of a rank cannot be divided into {parts} equal parts; "
        "use a multiple of {parts}",
        _uneven_parts,
        TopologyError,
    ),
    _rule(
        "buckets: the training loop does not support several lengths with several sizes; use one "
        "of them",
        lambda f: f.buckets,
    ),
)
"""Rules of a job, from a configuration file or a command line."""


def _longest(f: Facts) -> object:
    longest = max(f.context_parallel_sizes) * _rows(f)
    exceeds = f.position_embedding_type == "learned_absolute" and longest > f.seq_length
    return exceeds and {"longest": longest}


CONTEXT_FILE_RULES = (
    *CONTEXT_RULES,
    *SIZE_RULES,
    *RANK_RULES,
    _rule(
        "document_counts: the training command does not support the two together; use one of them",
        lambda f: f.document_counts,
    ),
    _rule(
        "seq_length: documents may have {longest} tokens, and learned positions end at "
        "{seq_length}; raise it, or use {position_embedding_type=rope}",
        _longest,
    ),
    _rule(
        "pad_seq_to_mult: documents are padded for the ranks that share them; use "
        "{pad_seq_to_mult=1}",
        lambda f: f.pad_seq_to_mult > 1,
    ),
)
"""Rules of a configuration file."""
