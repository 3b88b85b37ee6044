"""The rules of ``packing.context_parallel_sizes``: a size for each microbatch."""

from __future__ import annotations

from collections.abc import Callable

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["CONTEXT_FILE_RULES", "CONTEXT_RULES", "RANK_RULES", "SIZE_RULES"]


def _rows(f: Facts) -> int:
    """Return the rows of a microbatch on one rank."""
    return int(f.max_packed_tokens or f.seq_length or 1)


def _sized(
    text: str, when: Callable[[Facts], object], error: type[ConfigError] = ConfigError
) -> Rule:
    """Return a rule that applies only with ``context_parallel_sizes``."""
    return Rule(
        f"context_parallel_sizes {text}", lambda f: f.context_parallel_sizes and when(f), error
    )


def _uneven_sizes(f: Facts) -> object:
    sizes = [size for size in f.context_parallel_sizes if size < 1 or size.bit_count() > 1]
    return sizes and {"size": sizes[0]}


def _uneven_parts(f: Facts) -> object:
    parts = f.tensor_model_parallel_size or 1 if f.sequence_parallel else 1
    parts *= 2 if max(f.context_parallel_sizes) > 1 and parts % 2 else 1
    return _rows(f) % parts and {"rows": _rows(f), "parts": parts}


def _recomputes_with_sizes(part: str) -> Callable[[Facts], object]:
    return lambda f: (
        f.context_parallel_sizes
        and f.recompute_granularity == "selective"
        and part in (f.recompute_modules or ())
    )


CONTEXT_RULES = (
    Rule(
        "context_parallel_sizes context_parallel_size: the groups are formed from the "
        "data-parallel ranks; use {context_parallel_size=1}",
        lambda f: f.context_parallel_sizes and (f.context_parallel_size or 1) > 1,
    ),
    Rule(
        "context_parallel_sizes fp8: scales of ranks whose microbatches have several sizes are not "
        "supported; use one of them"
    ),
    Rule(
        "context_parallel_sizes mtp_num_layers: multi-token prediction sees only the rows on its "
        "rank; use one of them"
    ),
    Rule(
        "context_parallel_sizes hybrid_layer_pattern: a Mamba mixer splits its heads over the "
        "ranks that it was built for; use one of them"
    ),
    *(
        Rule(
            f"context_parallel_sizes recompute_modules: {part} would be recomputed with the "
            f"context-parallel group of another microbatch; leave {part} out",
            _recomputes_with_sizes(part),
        )
        for part in ("moe", "mla_up_proj")
    ),
)
"""Rules of microbatches that have a context-parallel size each."""
SIZE_RULES = (
    _sized(
        ": {size} is not a power of two, and groups of 1, 2, 4, ... neighbours share microbatches; "
        "leave it out",
        _uneven_sizes,
        TopologyError,
    ),
)
"""Rules of the sizes themselves."""
RANK_RULES = (
    _sized(
        "data_parallel_size: groups of 1, 2, 4, ... neighbours need a power of two; change the "
        "number of data-parallel ranks",
        lambda f: (f.data_parallel_size or 1).bit_count() > 1,
        TopologyError,
    ),
    _sized(
        "data_parallel_size: the data-parallel ranks share microbatches and are too few for a size "
        "of {largest}; leave that size out, or use more ranks",
        lambda f: (
            f.data_parallel_size
            and max(f.context_parallel_sizes) > f.data_parallel_size
            and {"largest": max(f.context_parallel_sizes)}
        ),
        TopologyError,
    ),
    _sized(
        "max_packed_tokens: the {rows} rows of a rank cannot be divided into {parts} equal parts; "
        "use a multiple of {parts}",
        _uneven_parts,
        TopologyError,
    ),
    _sized(
        "buckets: the training loop does not support several lengths with several sizes; use one "
        "of them",
        lambda f: f.buckets,
    ),
)
"""Rules of a job's sizes, from a configuration file or a command line."""
CONTEXT_FILE_RULES = (*CONTEXT_RULES, *SIZE_RULES, *RANK_RULES)
"""Rules of a configuration file."""
