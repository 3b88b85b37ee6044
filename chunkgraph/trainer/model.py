"""Build this rank's chunks of Megatron-core's model from a configuration."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.megatron.core.access import import_megatron, versions
from chunkgraph.megatron.features.experts.deep_ep_needs import deep_ep_is_missing
from chunkgraph.megatron.features.experts.rank_budget import flex_backend, knows_rank_budget
from chunkgraph.megatron.features.experts.rows_in_use import moe_layers_of
from chunkgraph.megatron.features.experts.worst_case_dispatch import use_worst_case_dispatch
from chunkgraph.megatron.features.packing.attention_limits import (
    AttentionSite,
    refuse_large_deterministic,
)
from chunkgraph.packing import PackedShape
from chunkgraph.schedules import splits_backward
from chunkgraph.settings import Config
from chunkgraph.settings.words import facts_of
from chunkgraph.trainer.expert_model import expert_block_spec, expert_settings, rank_capacity_factor
from chunkgraph.trainer.fusion import fuse_weight_gradients
from chunkgraph.trainer.hybrid_model import HybridChunks, hybrid_settings

__all__ = ["build_model", "layer_spec"]


def build_model(
    config: Config,
    device: torch.device,
    ddp_options: Mapping[str, Any] | None = None,
    *,
    transformer_options: Mapping[str, Any] | None = None,
    prepare: Callable[[nn.Module], None] = lambda _: None,
    ddp_scope: Callable[[], AbstractContextManager[object]] = nullcontext,
    wraps_in_ddp: bool = True,
) -> list[nn.Module]:
    """Build this rank's model chunks in training mode, wrapped in DDP.

    Megatron's config, which all chunks share, is ``chunks[0].config``.

    Args:
        config: the run; model parallel groups must be initialized and random numbers seeded.
        device: device of the parameters.
        ddp_options: more fields of Megatron's DistributedDataParallelConfig.
        transformer_options: more fields of Megatron's TransformerConfig.
        prepare: callback with every chunk before it is wrapped, for example to freeze parameters.
        ddp_scope: returns a context for the time that chunks are wrapped in DDP.
        wraps_in_ddp: whether to wrap chunks in DDP.

    Raises:
        ConfigError: The layers do not support the configured packed sequences or expert dispatch.
        MissingDependencyError: A package that DeepEP needs is missing.
    """
    _refuse_packed_attention(config, device)
    _refuse_missing_dispatcher(config, device)
    transformer_config = _transformer_config(config, device, transformer_options or {})
    delays = splits_backward(config.pipeline.schedule)
    # Megatron's check of the field requires expert-parallel overlap.
    transformer_config.delay_wgrad_compute = delays
    ddp_options = {"delay_wgrad_compute": delays, **(ddp_options or {})}
    build = (
        _gpt_chunks(config, transformer_config, device)
        if config.model.hybrid_layer_pattern is None
        else _hybrid_chunks(config, transformer_config, device)
    )
    rank = import_megatron("megatron.core.parallel_state").get_pipeline_model_parallel_rank()
    num_chunks = config.pipeline.num_model_chunks
    last_rank = config.pipeline.pipeline_model_parallel_size - 1
    chunks: list[nn.Module] = []
    for index in range(num_chunks):
        chunk = build(
            index=index,
            pre_process=rank == 0 and index == 0,
            post_process=rank == last_rank and index == num_chunks - 1,
        )
        prepare(chunk)
        if flex_backend(transformer_config) == "deepep":
            use_worst_case_dispatch(moe_layers_of(list(chunk.modules())))
        chunks.append(chunk.to(device))
    if config.model.params_dtype == "bfloat16":
        half = import_megatron("megatron.core.transformer.module").Float16Module
        chunks = [half(transformer_config, chunk) for chunk in chunks]
    if wraps_in_ddp:
        with ddp_scope():
            chunks = _wrap_for_data_parallel(config, transformer_config, chunks, ddp_options)
    if config.train.gradient_accumulation_fusion:
        fuse_weight_gradients(chunks)
    for chunk in chunks:
        chunk.train()
    return chunks


def _refuse_packed_attention(config: Config, device: torch.device) -> None:
    """Refuse packed sequences that attention does not support, also in eager runs."""
    seqs, pipeline = config.packing.max_packed_seqs, config.pipeline
    if seqs and layer_spec_name(config, device) == "transformer_engine":
        heads = config.model.num_attention_heads // pipeline.tensor_model_parallel_size
        most = max(config.packing.context_parallel_sizes, default=1)
        shape = PackedShape(seqs, config.tokens_per_sequence * most)
        refuse_large_deterministic(AttentionSite.here(device, with_padding=True), shape, heads)


def _refuse_missing_dispatcher(config: Config, device: torch.device) -> None:
    """Refuse an expert dispatcher that is not available, also in eager runs."""
    moe = config.moe
    if moe.num_moe_experts is None or moe.moe_token_dispatcher_type != "flex":
        return
    if device.type != "cuda" or layer_spec_name(config, device) != "transformer_engine":
        raise ConfigError(
            "moe.moe_token_dispatcher_type=flex needs GPUs and Transformer Engine's layers "
            f"(device is {device.type}, model.layer_spec {layer_spec_name(config, device)}). Set "
            "moe.moe_token_dispatcher_type=alltoall and moe.moe_expert_capacity_factor."
        )
    if not knows_rank_budget():
        raise ConfigError(
            f"megatron-core {versions()['megatron_core']} has no "
            "moe.moe_expert_rank_capacity_factor. Use 0.18 or later, or set "
            "moe.moe_token_dispatcher_type=alltoall and moe.moe_expert_capacity_factor."
        )
    if (missing := deep_ep_is_missing(facts_of(config))) is not None:
        raise MissingDependencyError(missing)


def _hybrid_chunks(
    config: Config, transformer_config: Any, device: torch.device
) -> Callable[..., nn.Module]:
    """Return a function that builds chunks of a hybrid model."""
    # Call the user's function first: it may prepare something.
    spec = layer_spec(config, device)
    if layer_spec_name(config, device) == "transformer_engine":
        return HybridChunks(config, transformer_config, None).build  # Megatron has a stack for it
    experts = None
    if config.moe.num_moe_experts is not None:
        specs = import_megatron("megatron.core.models.gpt.gpt_layer_specs")
        layer = specs.get_gpt_layer_local_spec(
            num_experts=config.moe.num_moe_experts,
            moe_grouped_gemm=transformer_config.moe_grouped_gemm,
        )
        experts = layer.submodules.mlp
    return HybridChunks(config, transformer_config, spec, experts).build


def _gpt_chunks(
    config: Config, transformer_config: Any, device: torch.device
) -> Callable[..., nn.Module]:
    """Return a function that builds chunks of a GPT model."""
    gpt_model = import_megatron("megatron.core.models.gpt").GPTModel
    latent = getattr(transformer_config, "multi_latent_attention", False)
    has_experts = transformer_config.num_moe_experts is not None
    spec_name = layer_spec_name(config, device)
    num_chunks = config.pipeline.num_model_chunks
    if not has_experts or spec_name not in {"local", "transformer_engine"}:
        spec = layer_spec(config, device, {"multi_latent_attention": True} if latent else {})
        specs = [spec] * num_chunks
    else:
        specs = [
            expert_block_spec(
                config,
                transformer_config,
                index,
                use_transformer_engine=spec_name == "transformer_engine",
            )
            for index in range(num_chunks)
        ]

    def build(*, index: int, pre_process: bool, post_process: bool) -> nn.Module:
        stage = index if num_chunks > 1 else None
        spec = specs[index]
        if device.type == "cpu":
            spec = _with_torch_norm(spec, transformer_config, stage)
        chunk: nn.Module = gpt_model(
            config=transformer_config,
            transformer_layer_spec=spec,
            vocab_size=config.model.vocab_size,
            max_sequence_length=config.model.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=(
                not config.model.untie_embeddings_and_output_weights
            ),
            vp_stage=stage,
            **_token_predictors(config, transformer_config, device, specs[index], index),
        )
        return chunk

    return build


def _with_torch_norm(spec: Any, transformer_config: Any, stage: int | None) -> Any:
    """Return a block's spec with torch's final norm.

    If Transformer Engine is installed, Megatron uses its final norm after layers of any spec, and
    this norm needs a GPU.
    """
    block = import_megatron("megatron.core.transformer.transformer_block")
    norm = import_megatron("megatron.core.transformer.torch_norm").WrappedTorchNorm
    layer = import_megatron("megatron.core.transformer.transformer_layer").BaseTransformerLayer
    kind = getattr(spec, "module", None)
    is_layer = isinstance(kind, type) and issubclass(kind, layer)
    if not is_layer or block.LayerNormImpl is norm:
        return spec
    num_layers = block.get_num_layers_to_build(transformer_config, stage)
    return block.TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=norm)


def _token_predictors(
    config: Config, transformer_config: Any, device: torch.device, spec: Any, index: int
) -> dict[str, Any]:
    """Return GPTModel's argument for multi-token prediction, if it is configured."""
    if not getattr(transformer_config, "mtp_num_layers", None):
        return {}
    make = import_megatron("megatron.core.models.gpt.gpt_layer_specs").get_gpt_mtp_block_spec
    stage = index if config.pipeline.num_model_chunks > 1 else None
    name = layer_spec_name(config, device)
    return {
        "mtp_block_spec": make(
            transformer_config, spec, use_transformer_engine=name != "local", vp_stage=stage
        )
    }


def layer_spec_name(config: Config, device: torch.device) -> str:
    """Return ``model.layer_spec``; the device decides ``auto``."""
    name = config.model.layer_spec
    if name == "auto":
        return "local" if device.type == "cpu" else "transformer_engine"
    return name


def layer_spec(
    config: Config, device: torch.device, options: Mapping[str, Any] | None = None
) -> Any:
    """Return the spec of a transformer layer that ``model.layer_spec`` names.

    Args:
        config: the run.
        device: decides what ``auto`` is.
        options: more arguments of Megatron's function that returns the spec.

    Raises:
        ConfigError: The user's function cannot be imported.
        MissingDependencyError: Transformer Engine is required and not installed.
    """
    name = layer_spec_name(config, device)
    options = options or {}
    if name == "local" and config.model.fp8 is not None:
        raise ConfigError(
            f"model.fp8 is {config.model.fp8}, but local layers have no FP8. Use Transformer "
            "Engine's layers on a GPU (model.layer_spec=transformer_engine), or set "
            "model.fp8=null."
        )
    if name not in {"local", "transformer_engine"}:
        return _user_spec(name)
    specs = import_megatron("megatron.core.models.gpt.gpt_layer_specs")
    if name == "transformer_engine":
        try:
            importlib.import_module("transformer_engine.pytorch")
        except ImportError as error:
            raise MissingDependencyError(
                "model.layer_spec is transformer_engine, which cannot be imported "
                f"({error}). Install chunkgraph[te], or set model.layer_spec=local."
            ) from error
        return specs.get_gpt_layer_with_transformer_engine_spec(**options)
    make = specs.get_gpt_layer_local_spec
    parameters = inspect.signature(make).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "normalization" in parameters or takes_any:
        return make(normalization=config.model.normalization, **options)
    return make(**options)


def _user_spec(name: str) -> Any:
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.layer_spec is {name}, but {error}. Use package.module:function, importable by "
            "the workers, that returns a Megatron module spec."
        ) from error
    return function()


def _transformer_config(config: Config, device: torch.device, options: Mapping[str, Any]) -> Any:
    transformer_config = import_megatron("megatron.core.transformer.transformer_config")
    model, pipeline = config.model, config.pipeline
    dtype = torch.bfloat16 if model.params_dtype == "bfloat16" else torch.float32
    on_cpu = device.type == "cpu"
    interleaved = pipeline.num_model_chunks > 1
    settings: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": 0.0,  # Megatron's default is 0.1
        "normalization": model.normalization,
        "gated_linear_unit": model.swiglu,
        "activation_func": functional.silu if model.swiglu else functional.gelu,
        "add_bias_linear": not model.swiglu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": on_cpu,
        "tensor_model_parallel_size": pipeline.tensor_model_parallel_size,
        "sequence_parallel": pipeline.sequence_parallel,
        "context_parallel_size": pipeline.context_parallel_size,
        "pipeline_model_parallel_size": pipeline.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": pipeline.num_model_chunks if interleaved else None,
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
    }
    settings.update(expert_settings(config, is_local=layer_spec_name(config, device) == "local"))
    names = {field.name for field in fields(transformer_config.TransformerConfig)}
    settings.update({k: v for k, v in hybrid_settings(config).items() if k in names})
    if model.recompute_granularity is not None:
        settings["recompute_granularity"] = model.recompute_granularity
        if model.recompute_granularity == "full":
            settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        settings["recompute_modules"] = list(model.recompute_modules)
    if model.fp8 is not None:
        settings["fp8"] = model.fp8
        settings["fp8_recipe"] = model.fp8_recipe
    if interleaved:
        settings["microbatch_group_size_per_vp_stage"] = pipeline.microbatch_group_size
    settings.update(options)
    kind = "MLATransformerConfig" if settings.get("multi_latent_attention") else "TransformerConfig"
    result = getattr(transformer_config, kind)(**settings)
    if flex_backend(result) == "deepep":
        # Megatron's check accepts no budget with this backend.
        result.moe_expert_rank_capacity_factor = rank_capacity_factor(config)
    return result


def _wrap_for_data_parallel(
    config: Config, transformer_config: Any, chunks: list[nn.Module], options: Mapping[str, Any]
) -> list[nn.Module]:
    distributed = import_megatron("megatron.core.distributed")
    train = config.train
    ddp_config = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=train.overlap_grad_reduce,
        use_distributed_optimizer=train.use_distributed_optimizer,
        **options,
    )
    wrapped: list[nn.Module] = [
        distributed.DistributedDataParallel(
            config=transformer_config,
            ddp_config=ddp_config,
            module=chunk,
            # Only the first chunk's reduction is on the critical path.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    if train.overlap_grad_reduce:
        no_sync: list[Any] = [chunk.no_sync for chunk in wrapped]
        transformer_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    transformer_config.finalize_model_grads_func = distributed.finalize_model_grads
    return wrapped
