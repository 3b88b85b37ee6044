"""A model whose experts HybridEP serves."""

from __future__ import annotations

from typing import Any

HOLDS: dict[str, Any] = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_expert_rank_capacity_factor": 1.5,
    "use_transformer_engine_op_fuser": True,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "gated_linear_unit": True,
    "bf16": True,
    "expert_model_parallel_size": 2,
}
