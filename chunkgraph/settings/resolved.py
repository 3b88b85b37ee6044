"""A configuration with the defaults that depend on other settings filled in."""

from __future__ import annotations

from dataclasses import replace

from chunkgraph.settings.config import (
    Config,
    ExpertConfig,
    ModelConfig,
    PackingConfig,
    PipelineConfig,
)

__all__ = ["resolved"]


def resolved(config: Config) -> Config:
    """The same run with every value written out that is otherwise found only when it is needed.

    Null stays where it means that there is none (no limit, no experts), and where only the machine
    can tell (``device: auto`` and layers that depend on it).
    """
    return replace(
        config,
        model=_model(config),
        moe=_experts(config),
        pipeline=_pipeline(config.pipeline),
        packing=_packing(config),
    )


def _model(config: Config) -> ModelConfig:
    model = config.model
    if model.layer_spec == "auto" and config.device != "auto":
        spec = "local" if config.device == "cpu" else "transformer_engine"
        model = replace(model, layer_spec=spec)
    if model.hybrid_layer_pattern is not None and model.mamba_num_heads is None:
        model = replace(model, mamba_num_heads=2 * model.hidden_size // model.mamba_head_dim)
    return model


def _experts(config: Config) -> ExpertConfig:
    moe = config.moe
    if moe.num_moe_experts is None or moe.moe_ffn_hidden_size is not None:
        return moe
    return replace(moe, moe_ffn_hidden_size=config.model.ffn_hidden_size)


def _pipeline(pipeline: PipelineConfig) -> PipelineConfig:
    return replace(
        pipeline,
        virtual_pipeline_model_parallel_size=pipeline.num_model_chunks,
        microbatch_group_size_per_vp_stage=pipeline.microbatch_group_size,
    )


def _packing(config: Config) -> PackingConfig:
    packing = config.packing
    if not packing.max_packed_seqs:
        return packing
    return replace(
        packing,
        max_packed_tokens=config.tokens_per_sequence,
        seq_buckets=config.seq_buckets,
        captured_context_parallel_sizes=packing.captured_context_parallel_sizes
        or packing.context_parallel_sizes,
    )
