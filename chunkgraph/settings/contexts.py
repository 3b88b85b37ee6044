"""What the settings of a context-parallel size for each microbatch demand of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chunkgraph._text import shown
from chunkgraph.errors import ConfigError, TopologyError

if TYPE_CHECKING:
    from chunkgraph.settings.config import Config

__all__ = ["check_contexts"]

_KEY = "packing.context_parallel_sizes"


def check_contexts(config: Config) -> None:
    """Check ``packing.context_parallel_sizes`` and what depends on it.

    Raises:
        ConfigError: Two settings cannot go together.
        TopologyError: The ranks cannot form groups of these sizes.
    """
    packing = config.packing
    sizes = packing.context_parallel_sizes
    if not sizes:
        for name, value, default in (
            ("captured_context_parallel_sizes", list(packing.captured_context_parallel_sizes), []),
            ("context_parallel_schedule", packing.context_parallel_schedule, "smallest"),
        ):
            if value != default:
                raise ConfigError(
                    f"packing.{name} is {value}, but {_KEY} is []: no microbatch has a "
                    "context-parallel size of its own. Give the sizes."
                )
        return
    if not packing.max_packed_seqs:
        raise ConfigError(
            f"{_KEY} is {shown(list(sizes))}, but packing is off: packing.max_packed_seqs is 0. "
            "Set it to the most documents of a microbatch and 1."
        )
    _check_ranks(config)
    _check_others(config)
    unknown = sorted(set(packing.captured_context_parallel_sizes) - set(sizes))
    if unknown:
        raise ConfigError(
            f"packing.captured_context_parallel_sizes has {shown(unknown)}, which {_KEY} "
            f"{shown(list(sizes))} has not."
        )


def _check_ranks(config: Config) -> None:
    sizes, pipeline = config.packing.context_parallel_sizes, config.pipeline
    num_ranks, largest = pipeline.data_parallel_size, max(sizes)
    for name, value in (
        ("pipeline.data_parallel_size", num_ranks),
        *((_KEY, size) for size in sizes),
    ):
        if value < 1 or value.bit_count() > 1:
            raise TopologyError(
                f"{name}: {value} is no power of two, and groups of 1, 2, 4, ... neighbours are to "
                "share microbatches."
            )
    if largest > num_ranks:
        raise TopologyError(
            f"{_KEY} has {largest}, but only the {num_ranks} data-parallel ranks share "
            "microbatches. Raise pipeline.data_parallel_size, or leave it out."
        )
    rows = config.tokens_per_sequence
    parts = pipeline.tensor_model_parallel_size if pipeline.sequence_parallel else 1
    parts *= 2 if largest > 1 and parts % 2 else 1
    if rows % parts:
        raise TopologyError(
            f"A rank has {rows} rows of a microbatch (packing.max_packed_tokens), which do not "
            f"divide in {parts} parts. Change them."
        )


def _check_others(config: Config) -> None:
    packing, model = config.packing, config.model
    for name, is_used in {
        f"packing.buckets={shown(list(packing.buckets))}": bool(packing.buckets),
        f"model.recompute_modules={shown(list(model.recompute_modules))}": (
            model.recompute_granularity == "selective"
            and bool({"moe", "mla_up_proj"} & set(model.recompute_modules))
        ),
        f"model.fp8={model.fp8}": model.fp8 is not None,
        (
            f"pipeline.context_parallel_size={config.pipeline.context_parallel_size}"
        ): config.pipeline.context_parallel_size > 1,
        f"data.document_counts={shown(list(config.data.document_counts))}": bool(
            config.data.document_counts
        ),
    }.items():
        if is_used:
            raise ConfigError(
                f"{_KEY} is {shown(list(packing.context_parallel_sizes))} with {name}: the "
                "training command does not join them. Leave one of them out."
            )
    longest = max(packing.context_parallel_sizes) * config.tokens_per_sequence
    if model.position_embedding_type == "learned_absolute" and longest > model.seq_length:
        raise ConfigError(
            f"{_KEY} lets documents have {longest} tokens, and learned positions end at "
            f"model.seq_length ({model.seq_length}). Raise it, or use rope."
        )
