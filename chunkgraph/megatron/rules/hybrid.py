"""The rules of a hybrid model and its pattern of layers."""

from __future__ import annotations

from chunkgraph.errors import TopologyError
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["HYBRID_FILE_RULES", "HYBRID_RULES"]

HYBRID_RULES = (
    Rule("fp8 hybrid_layer_pattern: the two are not supported together; use one of them"),
)
"""Rules of a hybrid model, from a file, a program or a command line."""


def _other_length(f: Facts) -> object:
    pattern = f.hybrid_layer_pattern
    if pattern is None:
        return False
    count = len(pattern.replace("|", ""))
    return count != f.num_layers and {"count": count}


def _other_stages(f: Facts) -> object:
    pattern = f.hybrid_layer_pattern
    if pattern is None:
        return False
    parts, num_chunks = pattern.split("|"), f.virtual_pipeline_model_parallel_size or 1
    num_stages = f.pipeline_model_parallel_size * num_chunks
    is_marked = len(parts) == num_stages and all(parts)
    is_equal = len(parts) == num_chunks == 1 and f.num_layers % num_stages == 0
    return not (is_marked or is_equal) and {"parts": len(parts), "stages": num_stages}


def _other_experts(f: Facts) -> object:
    pattern = f.hybrid_layer_pattern
    return pattern is not None and ("E" in pattern) != (f.num_moe_experts is not None)


HYBRID_FILE_RULES = (
    *HYBRID_RULES,
    Rule(
        "num_layers hybrid_layer_pattern: the pattern has {count} layers, and {num_layers=} counts "
        "layers of every kind; use {count}",
        _other_length,
    ),
    Rule(
        "hybrid_layer_pattern pipeline_model_parallel_size: the pattern has {parts} stage(s), but "
        "the pipeline has {stages}; separate as many stages by |, each with a layer, or use no | "
        "for equal stages of one model chunk a rank",
        _other_stages,
        TopologyError,
    ),
    Rule(
        "hybrid_layer_pattern num_moe_experts: E stands for a layer with experts; set both or none",
        _other_experts,
    ),
)
"""Rules of a configuration file."""
