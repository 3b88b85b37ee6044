"""Model features, each in both scopes: chunk graphs against eager training, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "apply_rope_fusion": False,
}


def _check(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        wrong = [s for s in result["steps"] if not (s["loss_equal"] and s["grad_norm_equal"])]
        assert not wrong, f"{name}: {wrong}"
        assert result["different_parameters"] == {}, name
        assert result["num_parameters_compared"] > 5_000, name
        assert result["capture_sessions"] == 1, name
        assert len({s["loss_chunk_hex"] for s in result["steps"]}) == len(result["steps"]), name
        assert all(step["replays"] > 0 for step in result["steps"][1:]), name


def _both(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    both = {}
    for name, case in cases.items():
        for scope in ("block", "chunk"):
            capture = {**case["config"].get("capture", {}), "scope": scope}
            both[f"{name}_{scope}"] = {**case, "config": {**case["config"], "capture": capture}}
    return both


def test_one_rank(run_cases: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """Parameters that do not train, under DDP and without it."""
    cases = {
        "frozen_parts": {
            "config": make_config(model=_DROPOUT),
            "frozen": [r"embedding", r"layers\.1\.", r"layers\.2\..*bias", r"final_layernorm"],
        },
        "frozen_no_ddp": {
            "config": make_config(model=_DROPOUT, train={"use_ddp": False}),
            "frozen": [r"layers\.3\.", r"output_layer"],
        },
    }
    _check(run_cases(_both(cases), 1))


@pytest.mark.skipif(
    metadata.version("megatron-core").startswith("0.16"),
    reason="0.16's multi-latent attention cannot be built without Transformer Engine",
)
def test_latent_attention(run_cases: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """Multi-latent attention with RoPE and with YARN."""
    cases = {
        "latent_rope": {
            "config": make_config(
                model={**_DROPOUT, "layer_spec": "user_specs:latent"}, capture={"poison": True}
            ),
            "transformer_options": {**_LATENT, "rope_type": "rope"},
        },
        "latent_yarn": {
            "config": make_config(model={**_DROPOUT, "layer_spec": "user_specs:latent"}),
            "transformer_options": {**_LATENT, "rope_type": "yarn", "rotary_scaling_factor": 4},
        },
    }
    _check(run_cases(_both(cases), 1))


def test_two_ranks(run_cases: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """Sequence parallelism, and a pipeline with a frozen embedding or a frozen stage."""
    cases = {
        "sequence_parallel": {
            "config": make_config(
                model={**_DROPOUT, "layer_spec": "user_specs:split_sequences_4"},
                pipeline={"tensor_model_parallel_size": 2},
                capture={"poison": True},
            ),
            "transformer_options": {"sequence_parallel": True},
        },
        "frozen_embedding": {
            "config": make_config(
                model=_DROPOUT,
                pipeline={"pipeline_model_parallel_size": 2},
                train={"num_microbatches": [4, 1, 3], "overlap_grad_reduce": True},
            ),
            "frozen": [r"embedding", r"decoder\.layers\.0\."],
        },
    }
    _check(run_cases(_both(cases), 2))


def test_four_ranks(run_cases: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """PP 4 with tied embeddings, and PP 2 x TP 2 with sequence parallelism."""
    cases = {
        "pp4_tied": {
            "config": make_config(
                model={**_DROPOUT, "untie_embeddings_and_output_weights": False},
                pipeline={"pipeline_model_parallel_size": 4},
                train={"num_microbatches": [5, 1, 8]},
            ),
        },
        "pp2_sequence_parallel": {
            "config": make_config(
                model={**_DROPOUT, "layer_spec": "user_specs:split_sequences_2"},
                pipeline={"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2},
                train={"num_microbatches": [3, 1, 4]},
            ),
            "transformer_options": {"sequence_parallel": True},
        },
    }
    _check(run_cases(_both(cases), 4))
