"""The rules of ``packing.context_parallel_sizes``: a size for each microbatch."""

from __future__ import annotations

from collections.abc import Callable

from chunkgraph.settings.rule import Facts, Rule

__all__ = ["BUCKETS_RULE", "CONTEXT_FILE_RULES", "CONTEXT_RULES"]


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
BUCKETS_RULE = Rule(
    "context_parallel_sizes buckets: the training loop does not support several lengths with "
    "several sizes; use one of them"
)
CONTEXT_FILE_RULES = (*CONTEXT_RULES, BUCKETS_RULE)
"""Rules of a configuration file. `ContextLimits` checks the sizes themselves."""
