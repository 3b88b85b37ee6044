"""Fill in the defaults that depend on other settings."""

from __future__ import annotations

from typing import Any

from chunkgraph.packing.seq_counts import default_seq_buckets
from chunkgraph.settings.models import Config

__all__ = ["resolved"]


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
