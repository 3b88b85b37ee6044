"""Megatron's settings and layer specs of a model with experts, from a configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.settings import Config

__all__ = ["expert_block_spec", "expert_settings"]

_NOT_MEGATRONS = ("token_drops",)
_WITH_FLEX = (
    "moe_flex_dispatcher_backend",
    "moe_expert_rank_capacity_factor",
    "use_transformer_engine_op_fuser",
)


def expert_settings(config: Config) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig for experts; none without experts."""
    moe = config.moe
    if moe.num_moe_experts is None:
        return {}
    settings = {
        item.name: getattr(moe, item.name)
        for item in fields(moe)
        if item.name not in _NOT_MEGATRONS
    }
    frequency = settings.pop("moe_layer_freq")
    if moe.moe_token_dispatcher_type == "flex":
        settings["moe_pad_expert_input_to_capacity"] = False
        if not config.capture.enabled:  # nothing would report rows without room
            settings["moe_expert_rank_capacity_factor"] = None
    else:
        if moe.moe_expert_capacity_factor is None:
            settings["moe_pad_expert_input_to_capacity"] = False
        # fields that some releases do not have
        for name in _WITH_FLEX:
            del settings[name]
    return {
        **settings,
        "moe_layer_freq": 1 if frequency is None else list(frequency),
        "moe_ffn_hidden_size": moe.moe_ffn_hidden_size or config.model.ffn_hidden_size,
        "expert_model_parallel_size": config.pipeline.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
    }


def expert_block_spec(
    config: Config, transformer_config: Any, index: int, *, use_transformer_engine: bool
) -> Any:
    """Return the spec of one chunk's block, which may mix layers with and without experts.

    Args:
        config: the run.
        transformer_config: Megatron's.
        index: index of the model chunk on this rank.
        use_transformer_engine: whether to use Transformer Engine's layers or Megatron's local ones.
    """
    make = import_megatron("megatron.core.models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec
    return make(
        transformer_config,
        use_transformer_engine=use_transformer_engine,
        normalization=config.model.normalization,
        vp_stage=index if config.pipeline.num_model_chunks > 1 else None,
    )
