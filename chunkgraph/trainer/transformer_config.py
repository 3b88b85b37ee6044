"""Make Megatron's TransformerConfig from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.nn import functional

from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.settings import Config

__all__ = ["expert_settings", "transformer_config"]

_OF_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "normalization"),
    *("hidden_dropout", "attention_dropout", "fp8", "fp8_recipe"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
)
_OF_PIPELINE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "sequence_parallel",
)


def transformer_config(config: Config, device: torch.device, options: Mapping[str, Any]) -> Any:
    """Return Megatron's TransformerConfig, or its subclass for multi-latent attention.

    Args:
        config: the run.
        device: this rank's device.
        options: more fields.
    """
    module = import_megatron("megatron.core.transformer.transformer_config")
    model, pipeline = config.model, config.pipeline
    dtype = getattr(torch, model.params_dtype)
    on_cpu = device.type == "cpu"
    interleaved = pipeline.num_model_chunks > 1
    settings: dict[str, Any] = {
        **{name: getattr(model, name) for name in _OF_MODEL},
        **{name: getattr(pipeline, name) for name in _OF_PIPELINE},
        "is_hybrid_model": model.hybrid_layer_pattern is not None,
        "recompute_modules": list(model.recompute_modules),
        "gated_linear_unit": model.swiglu,
        "activation_func": functional.silu if model.swiglu else functional.gelu,
        "add_bias_linear": not model.swiglu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": on_cpu,
        "virtual_pipeline_model_parallel_size": pipeline.num_model_chunks if interleaved else None,
        "microbatch_group_size_per_vp_stage": (
            pipeline.microbatch_group_size if interleaved else None
        ),
        "deallocate_pipeline_outputs": True,
        # Megatron's defaults on a GPU. Between two ranks that are both previous and next of each
        # other, batched sends of an interleaved schedule match the wrong receives. Gloo has no
        # batched sends, and its overlapped sends read a buffer after Megatron has freed it.
        "overlap_p2p_comm": interleaved and not on_cpu,
        "batch_p2p_comm": not interleaved and not on_cpu,
        # On by default in Megatron's training script; their kernels need a GPU.
        "apply_rope_fusion": not on_cpu and model.position_embedding_type == "rope",
        "bias_activation_fusion": not on_cpu,
        "bias_dropout_fusion": not on_cpu,
        "deterministic_mode": config.train.deterministic,
        **expert_settings(config),
    }
    # Some releases lack fields of hybrid models and of the flex dispatcher.
    known = {field.name for field in fields(module.TransformerConfig)}
    settings = {name: value for name, value in settings.items() if name in known} | dict(options)
    kind = "MLATransformerConfig" if settings.get("multi_latent_attention") else "TransformerConfig"
    return getattr(module, kind)(**settings)


def expert_settings(config: Config) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig for experts; none without experts."""
    moe = config.moe
    if moe.num_moe_experts is None:
        return {}
    settings = {
        item.name: list(value) if isinstance(value, tuple) else value
        for item in fields(moe)
        if (value := getattr(moe, item.name)) is not None and item.name != "token_drops"
    }
    if not config.capture.enabled:  # nothing would report rows without room
        settings.pop("moe_expert_rank_capacity_factor", None)
    return {
        "moe_ffn_hidden_size": config.model.ffn_hidden_size,
        **settings,
        "moe_pad_expert_input_to_capacity": (
            moe.moe_pad_expert_input_to_capacity and moe.moe_expert_capacity_factor is not None
        ),
        "expert_model_parallel_size": config.pipeline.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
    }
