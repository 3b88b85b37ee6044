"""Build Megatron-core's hybrid model (Mamba, attention, feed-forward) from a configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.model_kinds import HybridNames
from chunkgraph.megatron.features.hybrid.layers import (
    can_recompute_hybrid_layers,
    has_mamba_kernels,
    local_stack,
)
from chunkgraph.settings import Config

__all__ = ["HybridChunks", "hybrid_settings", "hybrid_stack_spec"]


def hybrid_settings(config: Config) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig for a hybrid model; none for GPT."""
    return {} if config.model.hybrid_layer_pattern is None else {"is_hybrid_model": True}


class HybridChunks:
    """Build the model chunks of a hybrid model.

    Args:
        config: the run, with ``model.hybrid_layer_pattern``.
        transformer_config: Megatron's TransformerConfig.
        spec: spec of a GPT layer or of a whole stack; None for Megatron's stack.
        experts: spec that replaces the GPT layer's feed-forward in expert layers.

    Raises:
        ConfigError: The installed release does not support the configuration.
        MissingDependencyError: There are Mamba layers, but their kernels are missing.
    """

    def __init__(
        self, config: Config, transformer_config: Any, spec: Any, experts: Any = None
    ) -> None:
        self._config = config
        self._transformer_config = transformer_config
        self._names = HybridNames()
        self._stack = (
            self._names.transformer_engine_spec()
            if spec is None
            else hybrid_stack_spec(spec, experts)
        )
        self._pattern = _pattern_of(config, knows_stages=self._names.knows_stages)
        recomputes_all = config.model.recompute_granularity == "full"
        if recomputes_all and not can_recompute_hybrid_layers():
            raise ConfigError(
                "model.recompute_granularity is full with model.hybrid_layer_pattern, and the "
                "hybrid stack of this Megatron-core release recomputes nothing. Set it to null, or "
                "use release 0.19."
            )
        if "M" in self._pattern and not has_mamba_kernels():
            raise MissingDependencyError(
                f"model.hybrid_layer_pattern ({self._pattern}) has Mamba layers, but mamba_ssm or "
                "einops cannot be imported, or not completely. Install mamba-ssm, causal-conv1d "
                "and einops, or use a pattern without M."
            )

    def build(self, *, index: int, pre_process: bool, post_process: bool) -> nn.Module:
        """Build one chunk of this rank.

        Args:
            index: index of the chunk on this rank.
            pre_process: whether it has the embedding.
            post_process: whether it has the output layer.
        """
        model = self._config.model
        stage: dict[str, Any] = {}
        if self._config.pipeline.num_model_chunks > 1:
            stage["vp_stage"] = index
        chunk: nn.Module = self._names.model(
            config=self._transformer_config,
            vocab_size=model.vocab_size,
            max_sequence_length=model.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            **{
                self._names.spec_argument: self._stack,
                self._names.pattern_argument: self._pattern,
            },
            **stage,
        )
        return chunk


def hybrid_stack_spec(spec: Any, experts: Any = None) -> Any:
    """Make the spec of a hybrid stack from the spec of a GPT layer.

    Attention and feed-forward become separate layers, each after its norm, as in Megatron's local
    layers. Mamba layers get plain linear layers. The spec of a stack is returned unchanged.

    Args:
        spec: a Megatron module spec.
        experts: the feed-forward of expert layers; None without experts.

    Raises:
        ConfigError: The GPT layer has its norms inside its linear layers.
    """
    names = HybridNames()
    if isinstance(spec.module, type) and issubclass(spec.module, names.stack):
        return spec
    module_spec = import_megatron("megatron.core.transformer.spec_utils").ModuleSpec
    layers = import_megatron("megatron.core.transformer.transformer_layer")
    mamba = import_megatron("megatron.core.ssm.mamba_layer")
    mixer = import_megatron("megatron.core.ssm.mamba_mixer")
    linear = import_megatron("megatron.core.tensor_parallel.layers")
    feed_forward = import_megatron("megatron.core.ssm.mlp_layer").MLPLayer
    identity = import_megatron("megatron.core.transformer.identity_op").IdentityOp
    layer = spec.submodules
    norm = layer.input_layernorm
    if norm is identity:
        raise ConfigError(
            "model.layer_spec returns a GPT layer whose norms are inside its linear layers, from "
            "which no Mamba layer can be made. Return the spec of a hybrid stack, or of a layer "
            "with separate norms."
        )
    submodules = layers.TransformerLayerSubmodules
    more: dict[str, Any] = {}
    if experts is not None:
        more["moe_layer"] = module_spec(
            module=layers.MoETransformerLayer,
            submodules=submodules(
                pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=experts, mlp_bda=layer.mlp_bda
            ),
        )
    return module_spec(
        module=local_stack(names.stack, norm),
        submodules=names.submodules(
            mamba_layer=module_spec(
                module=mamba.MambaLayer,
                submodules=mamba.MambaLayerSubmodules(
                    norm=norm,
                    mixer=module_spec(
                        module=mixer.MambaMixer,
                        submodules=mixer.MambaMixerSubmodules(
                            in_proj=linear.ColumnParallelLinear,
                            out_proj=linear.RowParallelLinear,
                        ),
                    ),
                    mamba_bda=layer.self_attn_bda,
                ),
            ),
            attention_layer=module_spec(
                module=spec.module,
                submodules=submodules(
                    input_layernorm=norm,
                    self_attention=layer.self_attention,
                    self_attn_bda=layer.self_attn_bda,
                ),
            ),
            mlp_layer=module_spec(
                module=feed_forward,
                submodules=submodules(
                    pre_mlp_layernorm=layer.pre_mlp_layernorm,
                    mlp=layer.mlp,
                    mlp_bda=layer.mlp_bda,
                ),
            ),
            **more,
        ),
    )


def _pattern_of(config: Config, *, knows_stages: bool) -> str:
    """Return the pattern in the form of the installed release.

    Raises:
        ConfigError: The release does not interleave hybrid stages, or needs stages of equal length.
    """
    pattern = config.model.hybrid_layer_pattern
    assert pattern is not None
    if knows_stages:
        return pattern
    if config.pipeline.num_model_chunks > 1:
        raise ConfigError(
            f"pipeline.virtual_pipeline_model_parallel_size is {config.pipeline.num_model_chunks} "
            "with model.hybrid_layer_pattern, and this Megatron-core release has no interleaved "
            "pipeline of hybrid models. Set it to null, or use release 0.19."
        )
    stages = pattern.split("|")
    if len({len(stage) for stage in stages}) > 1:
        raise ConfigError(
            f"model.hybrid_layer_pattern ({pattern}) has stages of different lengths, which this "
            "Megatron-core release does not support. Make them equal, or use release 0.19."
        )
    return "".join(stages)
