"""Choose the layers of Megatron's GPT and hybrid models from a configuration."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch

from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.model_kinds import HybridNames
from chunkgraph.megatron.features.hybrid.layers import (
    can_recompute_hybrid_layers,
    has_mamba_kernels,
    local_stack,
)
from chunkgraph.settings import Config, derived_fields

__all__ = ["gpt_arguments", "hybrid_model", "hybrid_stack_spec", "layer_spec", "layer_spec_name"]

_GPT_SPECS = "megatron.core.models.gpt.gpt_layer_specs"


def layer_spec_name(config: Config, device: torch.device) -> str:
    """Return ``model.layer_spec``; the device decides ``auto``."""
    name = config.model.layer_spec
    if name == "auto":
        return "local" if device.type == "cpu" else "transformer_engine"
    return name


def layer_spec(config: Config, device: torch.device) -> Any:
    """Return the spec of Megatron's local layer, or call the function of ``model.layer_spec``.

    Raises:
        ConfigError: The user's function cannot be imported.
    """
    name = layer_spec_name(config, device)
    if name == "local":
        make = import_megatron(_GPT_SPECS).get_gpt_layer_local_spec
        return make(**_normalization(config))
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.layer_spec is {name}, but {error}. Use package.module:function, importable by "
            "the workers, that returns a Megatron module spec."
        ) from error
    return function()


def _normalization(config: Config) -> dict[str, str]:
    """Return the argument of Megatron's functions of specs, if the configuration sets it."""
    fields = config.model.transformer_config
    return {name: fields[name] for name in ("normalization",) if name in fields}


def gpt_arguments(
    config: Config, transformer_config: Any, device: torch.device
) -> list[dict[str, Any]]:
    """Return the specs that GPTModel takes, for each chunk of this rank.

    Args:
        config: the run.
        transformer_config: Megatron's TransformerConfig.
        device: this rank's device.

    Raises:
        ConfigError: The layers have no FP8, or the user's function cannot be imported.
    """
    specs = import_megatron(_GPT_SPECS)
    name = layer_spec_name(config, device)
    if name == "local" and config.model.fp8 is not None:
        raise ConfigError(
            f"model.fp8 is {config.model.fp8}, but local layers have no FP8. Use Transformer "
            "Engine's layers on a GPU (model.layer_spec=transformer_engine), or set "
            "model.fp8=null."
        )
    is_own = name not in {"local", "transformer_engine"}
    own = layer_spec(config, device) if is_own else None
    num_chunks = config.pipeline.num_model_chunks
    arguments = []
    for index in range(num_chunks):
        stage = index if num_chunks > 1 else None
        spec: Any = own
        if not is_own:
            spec = specs.get_gpt_decoder_block_spec(
                transformer_config,
                use_transformer_engine=name == "transformer_engine",
                **_normalization(config),
                vp_stage=stage,
            )
        arguments.append({"transformer_layer_spec": spec})
        if getattr(transformer_config, "mtp_num_layers", None):
            arguments[-1]["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(
                transformer_config, spec, use_transformer_engine=name != "local", vp_stage=stage
            )
        if is_own and device.type == "cpu":
            arguments[-1]["transformer_layer_spec"] = _with_torch_norm(
                spec, transformer_config, stage
            )
    return arguments


def _with_torch_norm(spec: Any, transformer_config: Any, stage: int | None) -> Any:
    """Return the spec of a block with torch's final norm, if ``spec`` is a layer's.

    If Transformer Engine is installed, Megatron uses its final norm after layers of any spec, and
    this norm needs a GPU.
    """
    block = import_megatron("megatron.core.transformer.transformer_block")
    norm = import_megatron("megatron.core.transformer.torch_norm").WrappedTorchNorm
    layer = import_megatron("megatron.core.transformer.transformer_layer").BaseTransformerLayer
    kind = getattr(spec, "module", None)
    if not (isinstance(kind, type) and issubclass(kind, layer)):
        return spec
    num_layers = block.get_num_layers_to_build(transformer_config, stage)
    return block.TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=norm)


def hybrid_model(config: Config, device: torch.device) -> tuple[type[Any], dict[str, Any]]:
    """Return Megatron's hybrid model, and its arguments for layers.

    Args:
        config: the run, with ``model.hybrid_layer_pattern``.
        device: this rank's device.

    Raises:
        ConfigError: The installed release does not support the configuration.
        MissingDependencyError: There are Mamba layers, but their kernels are missing.
    """
    moe = config.moe
    if layer_spec_name(config, device) == "transformer_engine":
        stack = HybridNames().transformer_engine_spec()
    else:
        # Call the user's function first: it may prepare something.
        spec, experts = layer_spec(config, device), None
        if moe.num_moe_experts is not None:
            layer = import_megatron(_GPT_SPECS).get_gpt_layer_local_spec(
                num_experts=moe.num_moe_experts,
                moe_grouped_gemm=derived_fields(config).get("moe_grouped_gemm", False),
            )
            experts = layer.submodules.mlp
        stack = hybrid_stack_spec(spec, experts)
    names = HybridNames()
    pattern = config.model.hybrid_layer_pattern or ""
    if not names.knows_stages:
        stages = pattern.split("|")
        _refuse_in_release(config.pipeline.num_model_chunks > 1, "has no interleaved pipeline")
        _refuse_in_release(len(set(map(len, stages))) > 1, "has no stages of different lengths")
        pattern = "".join(stages)
    if not can_recompute_hybrid_layers():
        recomputes_all = config.model.recompute_granularity == "full"
        _refuse_in_release(recomputes_all, "recomputes nothing (model.recompute_granularity)")
    if "M" in pattern and not has_mamba_kernels():
        raise MissingDependencyError(
            f"model.hybrid_layer_pattern ({pattern}) has Mamba layers, but mamba_ssm or einops "
            "cannot be imported, or not completely. Install mamba-ssm, causal-conv1d and einops, "
            "or use a pattern without M."
        )
    return names.model, {names.spec_argument: stack, names.pattern_argument: pattern}


def _refuse_in_release(is_wanted: bool, lack: str) -> None:
    if is_wanted:
        raise ConfigError(
            f"model.hybrid_layer_pattern: this Megatron-core release {lack} of hybrid models. "
            "Change the setting, or use release 0.19."
        )


def hybrid_stack_spec(spec: Any, experts: Any = None) -> Any:
    """Make the spec of a hybrid stack from the spec of a GPT layer.

    Attention and feed-forward become separate layers, each after its norm, as in Megatron's local
    layers. Mamba layers get plain linear layers. The rest is that of Megatron's stack for
    Transformer Engine. The spec of a stack is returned unchanged.

    Args:
        spec: a Megatron module spec.
        experts: the feed-forward of expert layers; None without experts.

    Raises:
        ConfigError: The GPT layer has its norms inside its linear layers.
    """
    names = HybridNames()
    if isinstance(spec.module, type) and issubclass(spec.module, names.stack):
        return spec
    layer = spec.submodules
    norm = layer.input_layernorm
    if norm is import_megatron("megatron.core.transformer.identity_op").IdentityOp:
        raise ConfigError(
            "model.layer_spec returns a GPT layer whose norms are inside its linear layers, from "
            "which no Mamba layer can be made. Return the spec of a hybrid stack, or of a layer "
            "with separate norms."
        )
    linear = import_megatron("megatron.core.tensor_parallel.layers")
    stack = names.transformer_engine_spec()
    mixer = stack.submodules.mamba_layer.submodules.mixer
    projections = replace(
        mixer.submodules,
        in_proj=linear.ColumnParallelLinear,
        out_proj=linear.RowParallelLinear,
    )
    kind = import_megatron("megatron.core.ssm.mamba_mixer").MambaMixer
    parts: dict[str, dict[str, Any]] = {
        "mamba_layer": {
            "norm": norm,
            "mixer": replace(mixer, module=kind, submodules=projections),
        },
        "attention_layer": {"input_layernorm": norm, "self_attention": layer.self_attention},
        "mlp_layer": {"pre_mlp_layernorm": layer.pre_mlp_layernorm, "mlp": layer.mlp},
    }
    if experts is not None:
        parts["moe_layer"] = {"pre_mlp_layernorm": layer.pre_mlp_layernorm, "mlp": experts}
    layers = {name: getattr(stack.submodules, name) for name in parts}
    layers = {
        name: replace(one, submodules=replace(one.submodules, **parts[name]))
        for name, one in layers.items()
    }
    layers["attention_layer"].module = spec.module
    return replace(
        stack,
        module=local_stack(names.stack, norm),
        submodules=replace(stack.submodules, **layers),
    )
