"""Derive what follows from other settings: defaults, and fields of Megatron's config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chunkgraph.packing.seq_counts import default_seq_buckets
from chunkgraph.settings.models import Settings

if TYPE_CHECKING:
    from chunkgraph.settings.loader import Config

__all__ = ["derived_fields", "resolved"]


def derived_fields(config: Settings) -> dict[str, Any]:
    """Return fields of Megatron's TransformerConfig that are not settings.

    They follow from settings, unless ``model.transformer_config`` has them.
    """
    model, moe = config.model, config.moe
    fields: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if model.recompute_granularity == "full":
        fields |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if moe.num_moe_experts is not None:
        is_flex = moe.moe_token_dispatcher_type == "flex"
        has_budget = moe.moe_expert_rank_capacity_factor is not None and config.capture.enabled
        # Megatron's local experts have no grouped GEMM on a CPU.
        if model.layer_spec != "local" and config.device != "cpu":
            fields["moe_grouped_gemm"] = True
        # The softmax over one chosen expert is always 1, so the router would not train.
        if moe.moe_router_topk == 1:
            fields["moe_router_pre_softmax"] = True
        if is_flex:
            fields |= {"moe_flex_dispatcher_backend": "hybridep", "moe_router_dtype": "fp32"}
        if is_flex and has_budget:  # Megatron asks for it
            fields["use_transformer_engine_op_fuser"] = True
        if moe.moe_expert_capacity_factor is not None and not is_flex:
            fields["moe_pad_expert_input_to_capacity"] = True
    return fields | model.transformer_config


def resolved(config: Config) -> Config:
    """Return an equivalent configuration with derived defaults filled in.

    Null stays where it means "none" (no limit, no experts), and values that depend on the machine
    stay automatic (``device: auto``, and the layers that follow from it).
    """
    model, moe, packing, pipeline = config.model, config.moe, config.packing, config.pipeline
    changes: dict[str, dict[str, Any]] = {
        "pipeline": {
            "virtual_pipeline_model_parallel_size": pipeline.num_model_chunks,
            "microbatch_group_size_per_vp_stage": pipeline.microbatch_group_size,
        }
    }
    if model.layer_spec == "auto" and config.device != "auto":
        spec = "local" if config.device == "cpu" else "transformer_engine"
        changes["model"] = {"layer_spec": spec}
    if moe.num_moe_experts is not None and moe.moe_ffn_hidden_size is None:
        changes["moe"] = {"moe_ffn_hidden_size": model.ffn_hidden_size}
    if packing.max_packed_seqs:
        rows, seq_buckets = config.tokens_per_sequence, packing.seq_buckets
        if seq_buckets is None:
            # With context_parallel_sizes, rows are those of a rank, and this size is 1.
            size = pipeline.context_parallel_size
            seq_buckets = default_seq_buckets(packing.max_packed_seqs, rows, size, packing.buckets)
        changes["packing"] = {"max_packed_tokens": rows, "seq_buckets": seq_buckets}
    return config.replace(**changes)
