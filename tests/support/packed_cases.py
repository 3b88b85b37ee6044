"""Small models of every kind for packed documents, on a GPU and on a CPU.

On a GPU they have bfloat16 and Transformer Engine's layers; on a CPU float32, Megatron's local
layers and the plain attention of ``user_specs``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

HAS_LATENT = not metadata.version("megatron-core").startswith("0.16")
"""Whether multi-latent attention can be built without Transformer Engine."""

GPU_MODEL: dict[str, Any] = {
    "layer_spec": "transformer_engine",
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "seq_length": 256,
    "normalization": "RMSNorm",
    "swiglu": True,
    "params_dtype": "bfloat16",
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_expert_capacity_factor": 1.0,
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    "token_drops": "count",
}
"""With less room than some experts would need, so that tokens are dropped."""

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    # Keys as wide as values, so that attention needs no padding of heads.
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
}
_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "attention": ({}, {}, {}),
    "grouped": ({}, {}, {"num_query_groups": 2}),
    "unfused": ({}, {}, {"apply_rope_fusion": False}),
    "latent": ({}, {}, LATENT),
    "latent_unfused": ({}, {}, {**LATENT, "apply_rope_fusion": False}),
    "experts": ({}, {**EXPERTS, "moe_ffn_hidden_size": 256}, {}),
    "roomy_experts": (
        {},
        {**EXPERTS, "moe_ffn_hidden_size": 256, "moe_expert_capacity_factor": 2.0},
        {},
    ),
    "latent_experts": ({}, {**EXPERTS, "moe_ffn_hidden_size": 256}, LATENT),
    "hybrid": (
        {
            "hybrid_layer_pattern": "M-M*-M",
            "num_layers": 6,
            "mamba_state_dim": 64,
            "mamba_head_dim": 64,
            "mamba_num_groups": 4,
        },
        {},
        {},
    ),
}
"""Sections `model` and `moe`, and Megatron's own options, on a GPU."""


def gpu_case(
    text: Path | None,
    make_config: Callable[..., Any],
    kind: str,
    counts: list[int],
    *,
    capture: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    moe: dict[str, Any] | None = None,
    packing: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **pipeline: Any,
) -> dict[str, Any]:
    """Make a case of `run_cases` on packed documents; ``options`` are Megatron's own.

    Without a ``text``, documents are those of the package.

    Each context-parallel rank has 256 rows: cuDNN up to 9.15 cannot be captured if half of a
    rank's part of the longest sequence is no multiple of 128.
    """
    own_model, own_moe, own_options = _KINDS[kind]
    size = pipeline.get("context_parallel_size", 1)
    config = make_config(
        model={**GPU_MODEL, **own_model, **(model or {})},
        moe={**own_moe, **(moe or {})},
        pipeline=pipeline,
        train={
            "num_microbatches": counts,
            "micro_batch_size": 1,
            "deterministic": True,
            **(train or {}),
        },
        data={} if text is None else {"path": str(text)},
        packing={
            "max_packed_seqs": 12 if size == 1 else 24,
            "max_packed_tokens": 256 * size,
            **(packing or {}),
        },
        capture=capture or {},
        run={"timeout_s": 150},
    )
    options = {**own_options, **(options or {})}
    return {"config": {**config, "device": "cuda"}, "transformer_options": options}


SMALL_LATENT = {
    **LATENT,
    "apply_rope_fusion": False,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
SMALL_MIXERS = {"mamba_state_dim": 4, "mamba_head_dim": 8, "mamba_num_groups": 2}
SMALL_HYBRID: dict[str, Any] = {
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 2,
    **SMALL_MIXERS,
}
NORMS = {"swiglu": True, "normalization": "LayerNorm"}
_CPU_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "attention": ({"layer_spec": "user_specs:packed"}, {}, {}),
    "grouped": ({"layer_spec": "user_specs:packed"}, {}, {"num_query_groups": 2}),
    "latent": (
        {"layer_spec": "user_specs:packed_latent", **NORMS},
        {},
        SMALL_LATENT,
    ),
    "shared_latent": (
        {"layer_spec": "context_specs:split_latent", **NORMS},
        {},
        SMALL_LATENT,
    ),
    "roomy_experts": (
        {"layer_spec": "user_specs:packed_experts", **NORMS},
        {**EXPERTS, "moe_ffn_hidden_size": 32, "moe_expert_capacity_factor": 2.0},
        {},
    ),
    "hybrid": (
        {
            "layer_spec": "mamba_stand_in:packed",
            "hybrid_layer_pattern": "M*",
            **SMALL_HYBRID,
        },
        {},
        {},
    ),
}


def cpu_case(
    text: Path,
    make_config: Callable[..., Any],
    kind: str,
    counts: list[int],
    *,
    model: dict[str, Any] | None = None,
    moe: dict[str, Any] | None = None,
    packing: dict[str, Any] | None = None,
    capture: dict[str, Any] | None = None,
    stash: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **pipeline: Any,
) -> dict[str, Any]:
    """Make a case of `run_cases` with two layers; ``options`` are Megatron's own."""
    own_model, own_moe, own_options = _CPU_KINDS[kind]
    config = make_config(
        model={"num_layers": 2, **own_model, **(model or {})},
        moe={**own_moe, **(moe or {})},
        stash=stash or {},
        pipeline=pipeline,
        train={"num_microbatches": counts, "micro_batch_size": 1, **(train or {})},
        data={"path": str(text)},
        packing={"max_packed_seqs": 16, "max_packed_tokens": 48, **(packing or {})},
        capture=capture or {},
    )
    return {"config": config, "transformer_options": {**own_options, **(options or {})}}


def all_but_the_first_replay(results: dict[str, dict[str, Any]]) -> None:
    """Check that only the first step of each case is eager, and that its model trains."""
    for name, result in results.items():
        steps = result["steps"]
        assert [bool(s["replays"]) for s in steps] == [False] + [True] * (len(steps) - 1), name
        assert len({s["loss"] for s in steps}) == len(steps), name
