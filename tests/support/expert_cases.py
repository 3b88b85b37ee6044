"""Configurations of experts, and cases of `run_cases` with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}
BIASED = {
    **EXPERTS,
    "moe_router_topk": 3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_shared_expert_intermediate_size": 32,
}
GROUPED = {
    **EXPERTS,
    "moe_router_pre_softmax": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_z_loss_coeff": None,
}
OVERLAP = {"moe_shared_expert_overlap": True, "add_bias_linear": False}
_GATED = {"num_layers": 2, "swiglu": True, "normalization": "RMSNorm", "hidden_dropout": 0.1}


def case(
    make_config: Callable[..., dict[str, Any]],
    experts: dict[str, Any],
    *,
    model: dict[str, Any] | None = None,
    counts: Sequence[int] = (2, 1, 3),
    options: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> dict[str, Any]:
    """Make a case of a gated model with experts; ``options`` are Megatron's own."""
    config = make_config(
        model={**_GATED, **(model or {})},
        moe=experts,
        train={"num_microbatches": list(counts), **(train or {})},
        **sections,
    )
    return {"config": config, "transformer_options": options or {}}


def check_random_steps(ranks: Sequence[dict[str, Any]], num_steps: int) -> None:
    """Check the results of `dropless_probe`: equal to eager, after reruns and recaptures."""
    for rank in ranks:
        assert rank["differing"] == []
        assert len(rank["reruns"]) > num_steps // 10
        assert rank["recaptures"] == len(rank["reruns"])
        assert rank["replays"] > num_steps // 2
        assert rank["dropped"] == 0
