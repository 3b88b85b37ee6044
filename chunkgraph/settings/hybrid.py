"""What the pattern of a hybrid model must satisfy, and the sizes of its Mamba layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chunkgraph._text import shorten, shown
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.settings.rule import Rule

if TYPE_CHECKING:
    from chunkgraph.settings.config import Config

__all__ = ["HYBRID_RULES", "STAGE_END", "check_hybrid"]

STAGE_END = "|"
"""Stands between the stages of a pattern."""

_LAYERS = "M*-E"
_NOT_YET = {
    "/": "multi-token prediction",
    "G": "gated delta nets",
    "D": "sparse attention",
    "+": "multi-latent attention",
}


def check_hybrid(config: Config) -> None:
    """Check the pattern, and what Mamba layers demand of the sizes.

    Raises:
        ConfigError: the pattern or a size cannot be, or goes together with something it cannot.
        TopologyError: the layers cannot be spread over the pipeline.
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
    _check_sizes(config)
    _check_experts(config, pattern)


def _check_symbols(pattern: str) -> None:
    for symbol in pattern:
        if symbol in _LAYERS or symbol == STAGE_END:
            continue
        known = (
            f"is {_NOT_YET[symbol]} in Megatron-core, which the training command does not build in "
            "a hybrid model"
            if symbol in _NOT_YET
            else "is no layer"
        )
        msg = (
            f"model.hybrid_layer_pattern ({shorten(pattern)}) has {symbol!r}, which {known}. Use "
            "M (Mamba), * (attention), - (feed-forward), E (experts) and | between pipeline stages."
        )
        raise ConfigError(msg)
    if not all(pattern.split(STAGE_END)):
        msg = (
            f"model.hybrid_layer_pattern ({shown(pattern)}) has a stage without layers. Give every "
            "stage one."
        )
        raise ConfigError(msg)


def _check_stages(config: Config, pattern: str) -> None:
    pipeline, num_layers = config.pipeline, config.model.num_layers
    num_ranks, num_chunks = pipeline.pipeline_model_parallel_size, pipeline.num_model_chunks
    num_stages, num_given = num_ranks * num_chunks, pattern.count(STAGE_END) + 1
    if num_given not in (1, num_stages):
        msg = (
            f"model.hybrid_layer_pattern ({shorten(pattern)}) has {num_given} stages, but the "
            f"pipeline has {num_stages} (pipeline_model_parallel_size {num_ranks} x {num_chunks} "
            "model chunks each). Separate as many with |, or none for equal ones."
        )
        raise TopologyError(msg)
    if num_given == num_stages:
        return
    if num_chunks > 1:
        msg = (
            f"model.hybrid_layer_pattern ({shorten(pattern)}) does not say where stages end, which "
            f"Megatron-core wants for {num_chunks} model chunks a rank. Separate the {num_stages} "
            "stages with |."
        )
        raise TopologyError(msg)
    if num_layers % num_ranks:
        msg = (
            f"model.hybrid_layer_pattern ({shorten(pattern)}) has {num_layers} layers, which do "
            f"not divide into {num_ranks} stages. Separate the stages with |, or change the "
            "pipeline."
        )
        raise TopologyError(msg)


def _check_sizes(config: Config) -> None:
    model, tp = config.model, config.pipeline.tensor_model_parallel_size
    cp = config.pipeline.context_parallel_size
    heads, width = model.mamba_num_heads, 2 * model.hidden_size
    if heads is None:
        if width % model.mamba_head_dim:
            msg = (
                f"model.mamba_head_dim ({model.mamba_head_dim}) does not divide twice "
                f"model.hidden_size ({width}), the width of a Mamba layer without "
                "model.mamba_num_heads. Change one of them."
            )
            raise ConfigError(msg)
        heads = width // model.mamba_head_dim
    if heads % model.mamba_num_groups:
        msg = (
            f"{heads} Mamba heads do not divide into model.mamba_num_groups "
            f"({model.mamba_num_groups}). Change it, model.mamba_head_dim or model.mamba_num_heads."
        )
        raise ConfigError(msg)
    shared = {"Mamba heads": heads, "model.mamba_num_groups": model.mamba_num_groups}
    for what, size in shared.items():
        if size % tp:
            msg = (
                f"{what} ({size}): not divisible by pipeline.tensor_model_parallel_size ({tp}); "
                "every rank holds an equal share. Change one of them."
            )
            raise TopologyError(msg)
    if cp > 1 and "M" in (model.hybrid_layer_pattern or ""):
        _check_split_sizes(heads // tp, model.mamba_num_groups // tp, cp)


def _check_split_sizes(heads: int, groups: int, cp: int) -> None:
    """Heads and groups of a tensor-parallel rank, which context-parallel ranks share.

    As Megatron's ``MambaContextParallel`` asserts: there a rank works on all rows for its heads.
    """
    if heads % cp:
        msg = (
            f"{heads} Mamba heads of a tensor-parallel rank do not divide into "
            f"pipeline.context_parallel_size ({cp}) equal shares. Change it, model.mamba_head_dim "
            "or model.mamba_num_heads."
        )
        raise TopologyError(msg)
    if groups % cp and cp % groups:
        msg = (
            f"model.mamba_num_groups is {groups} on a tensor-parallel rank: neither that divides "
            f"into pipeline.context_parallel_size ({cp}) equal shares, nor the ranks into the "
            "groups. Change one of them."
        )
        raise TopologyError(msg)


def _check_experts(config: Config, pattern: str) -> None:
    moe = config.moe
    if ("E" in pattern) != (moe.num_moe_experts is not None):
        msg = (
            f"model.hybrid_layer_pattern is {shorten(pattern)} and moe.num_moe_experts "
            f"{moe.num_moe_experts}: the pattern says which layers have experts. Give it an E, or "
            "set the latter to null."
            if moe.num_moe_experts is not None
            else f"model.hybrid_layer_pattern ({shorten(pattern)}) has layers with experts (E), "
            "but moe.num_moe_experts is null. Give their number."
        )
        raise ConfigError(msg)
    if moe.num_moe_experts is not None and moe.moe_layer_freq is not None:
        msg = (
            f"moe.moe_layer_freq is {shown(list(moe.moe_layer_freq))}, but "
            f"model.hybrid_layer_pattern ({shorten(pattern)}) says which layers have experts. Set "
            "the former to null."
        )
        raise ConfigError(msg)


HYBRID_RULES = (
    Rule("fp8 hybrid_layer_pattern: the two were not tried together; leave one of them out"),
)
"""Those of a hybrid model, wherever its settings come from."""
