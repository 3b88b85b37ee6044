"""The checks of a hybrid model's pattern."""

from __future__ import annotations

from chunkgraph._text import shorten, shown
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.settings.models import Settings
from chunkgraph.settings.rule import Rule

__all__ = ["HYBRID_RULES", "STAGE_END", "check_hybrid"]

STAGE_END = "|"
"""The separator of pipeline stages in a pattern."""

_LAYERS = "M*-E"
_UNSUPPORTED = {
    "/": "multi-token prediction",
    "G": "gated delta nets",
    "D": "sparse attention",
    "+": "multi-latent attention",
}


def check_hybrid(config: Settings) -> None:
    """Check the pattern against the model and the pipeline.

    Raises:
        ConfigError: the pattern is invalid, or contradicts another setting.
        TopologyError: the layers cannot be distributed over the pipeline.
    """
    model = config.model
    pattern = model.hybrid_layer_pattern
    if pattern is None:
        return
    _check_symbols(pattern)
    layers = pattern.replace(STAGE_END, "")
    if len(layers) != model.num_layers:
        msg = (
            f"model.num_layers is {model.num_layers}, but model.hybrid_layer_pattern "
            f"({shorten(pattern)}) has {len(layers)} layers; the number counts layers of every "
            f"kind. Set it to {len(layers)}."
        )
        raise ConfigError(msg)
    _check_stages(config, pattern)
    _check_experts(config, pattern)


def _check_symbols(pattern: str) -> None:
    for symbol in pattern:
        if symbol in _LAYERS or symbol == STAGE_END:
            continue
        known = (
            f"is {_UNSUPPORTED[symbol]} in Megatron-core, which the training command does not "
            "support in a hybrid model"
            if symbol in _UNSUPPORTED
            else "is not a layer"
        )
        msg = (
            f"model.hybrid_layer_pattern ({shorten(pattern)}) has {symbol!r}, which {known}. Use "
            "M (Mamba), * (attention), - (feed-forward), E (experts) and | between pipeline stages."
        )
        raise ConfigError(msg)
    if not all(pattern.split(STAGE_END)):
        msg = (
            f"model.hybrid_layer_pattern ({shown(pattern)}) has a stage without layers. Every "
            "stage needs at least one."
        )
        raise ConfigError(msg)


def _check_stages(config: Settings, pattern: str) -> None:
    pipeline, num_layers = config.pipeline, config.model.num_layers
    num_ranks, num_chunks = pipeline.pipeline_model_parallel_size, pipeline.num_model_chunks
    num_stages, num_parts = num_ranks * num_chunks, pattern.count(STAGE_END) + 1
    if num_parts not in (1, num_stages):
        msg = (
            f"model.hybrid_layer_pattern ({shorten(pattern)}) has {num_parts} stages, but the "
            f"pipeline has {num_stages} (pipeline_model_parallel_size {num_ranks} x {num_chunks} "
            f"model chunks each). Separate {num_stages} stages with |, or use no | for equal ones."
        )
        raise TopologyError(msg)
    if num_parts == num_stages:
        return
    if num_chunks > 1:
        msg = (
            f"model.hybrid_layer_pattern ({shorten(pattern)}) does not mark where stages end, "
            f"which Megatron-core needs for {num_chunks} model chunks per rank. Separate the "
            f"{num_stages} stages with |."
        )
        raise TopologyError(msg)
    if num_layers % num_ranks:
        msg = (
            f"model.hybrid_layer_pattern ({shorten(pattern)}) has {num_layers} layers, which "
            f"cannot be divided into {num_ranks} equal stages. Separate the stages with |, or "
            "change the pipeline."
        )
        raise TopologyError(msg)


def _check_experts(config: Settings, pattern: str) -> None:
    moe = config.moe
    if ("E" in pattern) != (moe.num_moe_experts is not None):
        msg = (
            f"moe.num_moe_experts is {moe.num_moe_experts}, but model.hybrid_layer_pattern "
            f"({shorten(pattern)}) has no layer with experts. Add an E to the pattern, or set "
            "moe.num_moe_experts to null."
            if moe.num_moe_experts is not None
            else f"model.hybrid_layer_pattern ({shorten(pattern)}) has layers with experts (E), "
            "but moe.num_moe_experts is null. Set the number of experts."
        )
        raise ConfigError(msg)


HYBRID_RULES = (
    Rule("fp8 hybrid_layer_pattern: the two are not supported together; use one of them"),
)
"""Rules of a hybrid model, from a file, a program or a command line."""
