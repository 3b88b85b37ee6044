"""Make Megatron's TransformerConfig from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch.nn import functional

from chunkgraph._text import did_you_mean, shown
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.settings import Config, derived_fields

__all__ = ["expert_settings", "transformer_config"]

_OF_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
    *("fp8", "fp8_recipe", "recompute_granularity"),
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

    Raises:
        ConfigError: ``model.transformer_config`` has an unknown field or a wrong value.
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
        "apply_rope_fusion": not on_cpu,
        "bias_activation_fusion": not on_cpu,
        "bias_dropout_fusion": not on_cpu,
        "deterministic_mode": config.train.deterministic,
        **expert_settings(config),
        **derived_fields(config.model_copy(update={"device": device.type})),
    }
    is_latent = {**settings, **options}.get("multi_latent_attention")
    kind = getattr(module, "MLATransformerConfig" if is_latent else "TransformerConfig")
    known = {field.name for field in fields(kind)}
    settings |= _checked_fields(model.transformer_config, kind)
    # Some releases lack fields of hybrid models and of the flex dispatcher.
    settings = {name: value for name, value in settings.items() if name in known} | dict(options)
    return kind(**settings)


def _checked_fields(values: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the values of ``model.transformer_config`` with the types of Megatron's fields.

    Raises:
        ConfigError: There is no such field, or the value has another type.
    """
    types, checked = get_type_hints(kind), {}
    for name, value in values.items():
        path = f"model.transformer_config.{name}"
        if name not in types:
            raise ConfigError(
                f"{path}: {kind.__name__} of the installed Megatron-core has no such field."
                f"{did_you_mean(name, types)}"
            )
        adapter = TypeAdapter(types[name], config=ConfigDict(arbitrary_types_allowed=True))
        try:
            checked[name] = adapter.validate_python(value)
        except ValidationError as error:
            message = error.errors()[0]["msg"].replace("Input should", "it must")
            raise ConfigError(f"{path} is {shown(value)}; {message}.") from None
    return checked


def expert_settings(config: Config) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig for experts; none without experts."""
    moe = config.moe
    if moe.num_moe_experts is None:
        return {}
    settings = moe.model_dump(exclude={"token_drops"}, exclude_none=True)
    if not config.capture.enabled:  # nothing would report rows without room
        settings.pop("moe_expert_rank_capacity_factor", None)
    return {
        "moe_ffn_hidden_size": config.model.ffn_hidden_size,
        **settings,
        "expert_model_parallel_size": config.pipeline.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
    }
