"""A small model like Moonlight on real GPUs equals eager to the last bit.

It has multi-latent attention, 64 experts, shared experts and a dense first layer. A token chooses
six experts by sigmoid scores and a bias that follows the loads. Documents are packed, experts run
through HybridEP and save in the stash, and whole chunks are captured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_cases import all_but_the_first_replay

from chunkgraph.megatron.features.experts.grouped_gemm import native_need

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        importlib.util.find_spec("deep_ep") is None, reason="DeepEP's hybrid-ep is not installed"
    ),
]

COUNTS = [4, 6, 8, 3] * 7 + [4, 6]
SIX = [4, 2, 3, 6, 5, 1]
ROWS = 1024
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "rope_type": "rope",
    "rotary_base": 50000,
    "apply_rope_fusion": False,  # which only accepts YARN's tables
    "moe_router_topk_scaling_factor": 2.446,
}
EXPERTS = {
    "num_moe_experts": 64,
    "moe_router_topk": 6,
    "moe_ffn_hidden_size": 192,
    "moe_shared_expert_intermediate_size": 384,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.001,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "use_transformer_engine_op_fuser": True,
    "moe_pad_expert_input_to_capacity": False,
    "token_drops": "rerun",
}
Case = Callable[..., dict[str, Any]]


@pytest.fixture
def make_case(make_config: Callable[..., Any], write_documents: Callable[..., Path]) -> Case:
    """Make a case of four layers on documents of ``lengths``."""

    def make(
        counts: list[int],
        lengths: Sequence[int] = range(40, 400),
        factor: float = 2.0,
        packing: dict[str, Any] | None = None,
        stash: dict[str, Any] | None = None,
        num_layers: int = 4,
        **pipeline: int,
    ) -> dict[str, Any]:
        frequency = [0] + [1] * (num_layers - 1)
        moe = {"moe_layer_freq": frequency, "moe_expert_rank_capacity_factor": factor}
        config = make_config(
            model={
                "layer_spec": "transformer_engine",
                "num_layers": num_layers,
                "hidden_size": 512,
                "ffn_hidden_size": 1024,
                "num_attention_heads": 8,
                "seq_length": ROWS,
                "normalization": "RMSNorm",
                "swiglu": True,
                "params_dtype": "bfloat16",
            },
            moe={**EXPERTS, **moe},
            stash={"enabled": True, **(stash or {})},
            pipeline=pipeline,
            train={"num_microbatches": counts, "micro_batch_size": 1, "lr": 1e-4},
            data={"path": str(write_documents(lengths, 400))},
            packing={"max_packed_seqs": 24, **(packing or {})},
            capture={"scope": "chunk"},
            run={"timeout_s": 240},
        )
        return {"config": {**config, "device": "cuda"}, "transformer_options": LATENT}

    return make


def _check(result: dict[str, Any], most: float) -> None:
    """Check replays after the first step and balance losses; the stash holds at most ``most``."""
    steps = result["steps"]
    all_but_the_first_replay({"moonlight": result})
    assert not any(s["fallbacks"] for s in steps[1:])
    # Loads change as routers learn, but the first step decides the number of pages.
    assert sum(result["overflow_reruns"].values()) <= 2
    assert all(s["expert_metrics"]["seq_load_balancing_loss"] > 0 for s in steps)
    pairs = zip(result["stash_bytes"], result["bytes_without_stash"], strict=True)
    assert all(0 < pages < most * without for pages, without in pairs)


EP2 = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 6}
# Each microbatch is on one rank or both, while experts stay on two.
SIZES = {
    "context_parallel_sizes": [1, 2],
    "context_parallel_schedule": "random",
    "max_packed_tokens": ROWS,
}
ONE, TWO, FOUR = pytest.mark.gpu, pytest.mark.multigpu, pytest.mark.multigpu(4)


@pytest.mark.parametrize(
    ("options", "num_ranks", "most"),
    [
        # A group of one rank; every token stays here.
        pytest.param({"counts": [4, 6, 2, 3], "factor": 1.0}, 1, 1.6, marks=ONE, id="one"),
        pytest.param({"counts": COUNTS, **EP2}, 2, 0.9, marks=TWO, id="ep2"),
        # A document fills little more than half of the rows; no other rows are sent or stashed:
        # 0.55 x 1.1 / 2 of rows for twice all tokens; with all rows it would be 0.55.
        pytest.param(
            {"counts": [4, 2, 3, 6], "lengths": range(520, 600), **EP2},
            *(2, 0.45),
            marks=TWO,
            id="padding",
        ),
        # DeepEP's buffer has the size of the longest.
        pytest.param(
            {"counts": SIX, "lengths": [200, 900], "packing": {"buckets": [0.5]}, **EP2},
            *(2, 0.9),
            marks=TWO,
            id="buckets",
        ),
        pytest.param({"counts": SIX, "packing": SIZES, **EP2}, 2, 1.2, marks=TWO, id="sizes"),
        pytest.param({"counts": COUNTS, **PP2, **EP2}, 4, 0.9, marks=FOUR, id="pp2_ep2"),
    ],
)
def test_training_equals_eager(
    run_equal: Callable[..., Any],
    make_case: Case,
    options: dict[str, Any],
    num_ranks: int,
    most: float,
) -> None:
    """Up to thirty steps whose numbers of microbatches change."""
    if (need := native_need(torch.bfloat16)) is not None:
        pytest.skip(f"Megatron's fused experts: {need}")
    result = run_equal({"it": make_case(**options)}, num_ranks, timeout_s=480.0)["it"]
    _check(result, most)
    if "packing" in options:
        every_rank = result["replays_of_bank"]
        assert all(len(replays) == 2 and all(replays.values()) for replays in every_rank)
