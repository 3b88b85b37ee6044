"""Chunk graphs in verl's Megatron engine, for actors, critics and references; see docs/rl.md."""

from __future__ import annotations

from importlib import import_module

from chunkgraph.engine import CaptureOptions
from chunkgraph.integrations.attached import AttachedModels, Keywords, Packing, drawn, refuse
from chunkgraph.megatron.site import config_of


def install(packing: Packing, options: CaptureOptions | None = None) -> AttachedModels:
    """Let every Megatron engine of this process replay graphs, which sleep between its contexts.

    Args:
        packing: See `attach`. Rows hold ``max_token_len_per_gpu`` times the context-parallel size,
            and the padding of sequences.
        options: See `AttachedModels`.
    """
    engine = import_module("verl.workers.engine.megatron.transformer_impl")
    # Called when a context ends, and after a refit.
    offload = engine.MegatronEngine, "to"
    return AttachedModels(engine, offload, _with_packings, packing, options)


def _with_packings(keywords: Keywords) -> Keywords:
    """Pack sequences as the forward step will; refuse what no graph can hold."""
    engine = keywords["forward_step_func"].func.__self__
    settings, fp8 = engine.engine_config, config_of(engine.module[0]).fp8
    refuse(
        "verl",
        {
            "use_remove_padding=False": not settings.use_remove_padding,
            "dynamic_context_parallel": getattr(settings, "dynamic_context_parallel", False),
            "use_fused_kernels": getattr(settings, "use_fused_kernels", False),
            "router_replay": engine.enable_routing_replay,
        },
    )
    options = {"use_fp8_padding": fp8 in ("e4m3", "hybrid")}
    if getattr(settings, "pad_to_length", False):
        options["pad_to_length_bucket"] = settings.pad_to_length_bucket
    pack = import_module("verl.models.mcore.util").preprocess_thd_engine
    batches, keywords = drawn(keywords)
    params = [pack(batch["input_ids"], pre_process=False, **options)[1] for batch in batches]
    return {**keywords, "packings": [p.cu_seqlens_q.diff().tolist() for p in params]}
