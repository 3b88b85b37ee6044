"""Fill in the defaults that depend on other settings."""

from __future__ import annotations

from dataclasses import replace

from chunkgraph.packing.seq_counts import default_seq_buckets
from chunkgraph.settings.config import (
    Config,
    ExpertConfig,
    ModelConfig,
    PackingConfig,
    PipelineConfig,
)

__all__ = ["resolved"]


def resolved(config: Config) -> Config:
    """Return an equivalent configuration with derived defaults filled in.

    Null stays where it means "none" (no limit, no experts), and values that depend on the machine
    stay automatic (``device: auto``, and the layers that follow from it).
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
    rows, seq_buckets = config.tokens_per_sequence, packing.seq_buckets
    if seq_buckets is None:
        # With context_parallel_sizes, rows are those of a rank, and this size is 1.
        size = config.pipeline.context_parallel_size
        seq_buckets = default_seq_buckets(packing.max_packed_seqs, rows, size, packing.buckets)
    return replace(
        packing,
        max_packed_tokens=rows,
        seq_buckets=seq_buckets,
        captured_context_parallel_sizes=packing.captured_context_parallel_sizes
        or packing.context_parallel_sizes,
    )
