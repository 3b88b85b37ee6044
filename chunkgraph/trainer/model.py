"""Build this rank's chunks of Megatron-core's model, and its optimizer, from a configuration."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn
from torch.nn import functional

from chunkgraph._text import did_you_mean, shown
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron, patch_attributes
from chunkgraph.megatron.core.fused_gradients import fuse_gradients
from chunkgraph.megatron.core.model_kinds import HybridNames
from chunkgraph.megatron.features.hybrid import can_recompute_hybrid_layers
from chunkgraph.schedules import splits_backward
from chunkgraph.settings import Config, derived_fields, resolved


def build_model(
    config: Config,
    device: torch.device,
    *,
    ddp_options: Mapping[str, Any] | None = None,
    transformer_options: Mapping[str, Any] | None = None,
    prepare: Callable[[nn.Module], None] = lambda _: None,
) -> list[nn.Module]:
    """Build this rank's model chunks in training mode, wrapped in DDP.

    Megatron's config, which all chunks share, is ``chunks[0].config``.

    Args:
        config: the run; model parallel groups must be initialized and random numbers seeded.
        device: device of the parameters.
        ddp_options: more fields of Megatron's DistributedDataParallelConfig.
        transformer_options: more fields of Megatron's TransformerConfig.
        prepare: callback with every chunk before it is wrapped, for example to freeze parameters.

    Raises:
        ConfigError: The layers or the installed release do not support the model.
    """
    config = resolved(config.model_copy(update={"device": device.type}))
    if config.train.gradient_accumulation_fusion:
        fuse_gradients()  # otherwise Megatron asks for APEX
    model_config = _transformer_config(config, transformer_options or {})
    delays = splits_backward(config.pipeline.schedule)
    # Megatron's check of the field requires expert-parallel overlap.
    model_config.delay_wgrad_compute = delays
    model, num_chunks = config.model, config.pipeline.num_model_chunks
    if model.hybrid_layer_pattern is None:
        kind = import_megatron("megatron.core.models.gpt").GPTModel
        arguments = _gpt_arguments(config, model_config)
    else:
        kind, of_layers = _hybrid_model(config)
        arguments = [of_layers] * num_chunks
    rank = import_megatron("megatron.core.parallel_state").get_pipeline_model_parallel_rank()
    last_rank = config.pipeline.pipeline_model_parallel_size - 1
    chunks: list[nn.Module] = []
    with ExitStack() as undo:
        if device.type == "cpu":
            # Where Transformer Engine is installed, its norm follows layers of any spec.
            block = import_megatron("megatron.core.transformer.transformer_block")
            norm = import_megatron("megatron.core.transformer.torch_norm").WrappedTorchNorm
            undo.callback(patch_attributes(block, {"LayerNormImpl": norm}))
        for index in range(num_chunks):
            chunk = kind(
                config=model_config,
                vocab_size=model.vocab_size,
                max_sequence_length=model.seq_length,
                pre_process=rank == 0 and index == 0,
                post_process=rank == last_rank and index == num_chunks - 1,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
                **arguments[index],
                **({"vp_stage": index} if num_chunks > 1 else {}),
            )
            prepare(chunk)
            chunks.append(chunk.to(device))
    if model_config.bf16:
        half = import_megatron("megatron.core.transformer.module").Float16Module
        chunks = [half(model_config, chunk) for chunk in chunks]
    options = {"delay_wgrad_compute": delays, **(ddp_options or {})}
    chunks = _wrap_for_data_parallel(config, model_config, chunks, options)
    for chunk in chunks:
        chunk.train()
    return chunks


def _own_spec(config: Config) -> Any:
    """Return the spec of the function in ``model.layer_spec``; None for Megatron's own layers.

    Raises:
        ConfigError: The function cannot be imported.
    """
    name = config.model.layer_spec
    if name in {"local", "transformer_engine"}:
        return None
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.layer_spec is {name}, but {error}. Use package.module:function, importable by "
            "the workers, that returns a Megatron module spec."
        ) from error
    return function()


def _gpt_arguments(config: Config, transformer_config: Any) -> list[dict[str, Any]]:
    """Return the specs that GPTModel takes, for each chunk of this rank."""
    specs = import_megatron("megatron.core.models.gpt.gpt_layer_specs")
    own, num_chunks = _own_spec(config), config.pipeline.num_model_chunks
    on_engine = config.model.layer_spec != "local"
    arguments = []
    for stage in range(num_chunks) if num_chunks > 1 else (None,):
        spec = own or specs.get_gpt_decoder_block_spec(
            transformer_config,
            use_transformer_engine=on_engine,
            normalization=transformer_config.normalization,
            vp_stage=stage,
        )
        arguments.append({"transformer_layer_spec": spec})
        if transformer_config.mtp_num_layers:
            arguments[-1]["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(
                transformer_config, spec, use_transformer_engine=on_engine, vp_stage=stage
            )
    return arguments


def _hybrid_model(config: Config) -> tuple[type[Any], dict[str, Any]]:
    """Return Megatron's hybrid model, and its arguments for ``model.hybrid_layer_pattern``.

    Raises:
        ConfigError: The layers or the installed release do not support the configuration.
    """
    model, names = config.model, HybridNames()
    pattern = model.hybrid_layer_pattern or ""
    is_on_engine = model.layer_spec == "transformer_engine"
    stack = names.transformer_engine_spec() if is_on_engine else _own_spec(config)
    kind = getattr(stack, "module", None)
    if not (isinstance(kind, type) and issubclass(kind, names.stack)):
        raise ConfigError(
            f"model.layer_spec is {model.layer_spec}, which is no hybrid stack, but "
            "model.hybrid_layer_pattern is set. Use Transformer Engine's layers on a GPU "
            "(model.layer_spec=transformer_engine), or a function that returns a hybrid stack."
        )
    has_even_stages = len({len(stage) for stage in pattern.split("|")}) == 1
    is_plain = has_even_stages and config.pipeline.num_model_chunks == 1
    recomputes = model.recompute_granularity == "full"
    if not (names.knows_stages or is_plain) or (recomputes and not can_recompute_hybrid_layers()):
        raise ConfigError(
            "model.hybrid_layer_pattern: hybrid models of this Megatron-core release have no "
            "interleaved pipeline, no stages of different lengths and no full recomputation "
            "(model.recompute_granularity). Change the setting, or use release 0.19."
        )
    if not names.knows_stages:
        pattern = pattern.replace("|", "")
    return names.model, {names.spec_argument: stack, names.pattern_argument: pattern}


def _transformer_config(config: Config, options: Mapping[str, Any]) -> Any:
    """Return Megatron's TransformerConfig, or its subclass for multi-latent attention.

    ``config`` is resolved, with the device of this rank; ``options`` are more fields.

    Raises:
        ConfigError: ``model.transformer_config`` has an unknown field or a wrong value.
    """
    module = import_megatron("megatron.core.transformer.transformer_config")
    model, pipeline = config.model, config.pipeline
    dtype = getattr(torch, model.params_dtype)
    on_cpu = config.device == "cpu"
    interleaved = pipeline.num_model_chunks > 1
    settings: dict[str, Any] = {
        **model.model_dump(),
        **pipeline.model_dump(),
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
        "gradient_accumulation_fusion": config.train.gradient_accumulation_fusion,
    }
    if config.moe.num_moe_experts is not None:
        settings |= config.moe.model_dump(exclude_none=True) | {"expert_tensor_parallel_size": 1}
        if not config.capture.enabled:  # nothing would report rows without room
            settings.pop("moe_expert_rank_capacity_factor", None)
    settings |= derived_fields(config)
    is_latent = {**settings, **options}.get("multi_latent_attention")
    kind = getattr(module, "MLATransformerConfig" if is_latent else "TransformerConfig")
    known = {field.name for field in fields(kind)}
    settings |= _checked_fields(model.transformer_config, kind)
    # Not all settings are fields, and releases lack some of hybrid models and the flex dispatcher.
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


def _wrap_for_data_parallel(
    config: Config, model_config: Any, chunks: list[nn.Module], options: Mapping[str, Any]
) -> list[nn.Module]:
    distributed = import_megatron("megatron.core.distributed")
    train = config.train
    settings = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": train.overlap_grad_reduce,
        "use_distributed_optimizer": train.use_distributed_optimizer,
        "overlap_param_gather": train.overlap_param_gather,
        **options,
    }
    ddp_config = distributed.DistributedDataParallelConfig(**settings)
    wrapped: list[nn.Module] = [
        distributed.DistributedDataParallel(
            config=model_config,
            ddp_config=ddp_config,
            module=chunk,
            # Only the first chunk's reduction is on the critical path.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    if train.overlap_grad_reduce:
        no_sync: list[Any] = [chunk.no_sync for chunk in wrapped]
        model_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    model_config.finalize_model_grads_func = distributed.finalize_model_grads
    return wrapped


def build_optimizer(config: Config, chunks: list[nn.Module]) -> Any:
    """Return ``get_megatron_optimizer``'s Adam with gradient clipping over all stages."""
    optimizers = import_megatron("megatron.core.optimizer")
    dtype = getattr(torch, config.model.params_dtype)
    optimizer = optimizers.get_megatron_optimizer(
        optimizers.OptimizerConfig(
            optimizer="adam",
            lr=config.train.lr,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            clip_grad=1.0,
            use_distributed_optimizer=config.train.use_distributed_optimizer,
        ),
        chunks,
    )
    model_config: Any = chunks[0].config
    model_config.grad_scale_func = optimizer.scale_loss
    return optimizer


def zero_gradients(chunks: list[nn.Module], optimizer: Any) -> None:
    """Reset the last step's gradients in DDP's buffers and in the parameters."""
    for chunk in chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()  # type: ignore[operator]
    optimizer.zero_grad()
