"""The rules of a model with experts, from a file, a program or a command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunkgraph.errors import TopologyError
from chunkgraph.megatron.rules.hybrid_ep import HYBRID_EP_RULES, STATIC
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["EXPERT_RULES", "uses_dropless"]


def _enough(f: Facts) -> float:
    """Return the capacity factor that has room for all tokens."""
    return float(f.num_moe_experts / (f.moe_router_topk or 1))


def uses_dropless(model: Any) -> bool:
    """Return whether experts take all tokens, without a capacity.

    Args:
        model: `Facts`, or a TransformerConfig; a `Config` has to be turned into facts first.
    """
    factor = getattr(model, "moe_expert_capacity_factor", None)
    return bool(getattr(model, "num_moe_experts", None) and (factor is None or factor < 0))


def _captures_dropless(f: Facts) -> bool:
    return bool(f.captures and uses_dropless(f))


def _with_capacity(when: Callable[[Facts], object]) -> Callable[[Facts], object]:
    """Return a condition on experts with a fixed capacity each."""
    return lambda f: (
        f.num_moe_experts
        and f.moe_token_dispatcher_type != "flex"
        and not uses_dropless(f)
        and when(f)
    )


EXPERT_RULES = (
    Rule(
        "expert_model_parallel_size: it does not divide {num_moe_experts}; every rank holds the "
        "same number of experts; change one of them",
        lambda f: f.num_moe_experts and f.num_moe_experts % (f.expert_model_parallel_size or 1),
        TopologyError,
    ),
    Rule(
        "fp8_recipe moe_expert_capacity_factor: no grouped GEMM takes counts from the device with "
        f"this recipe; use {{fp8_recipe=tensorwise}} or {{fp8_recipe=blockwise}}, or {STATIC}",
        lambda f: _captures_dropless(f) and f.fp8_recipe not in (None, "tensorwise", "blockwise"),
    ),
    Rule(
        "fp8 moe_grouped_gemm moe_expert_capacity_factor: only grouped experts are quantized with "
        f"counts from the device; use {{moe_grouped_gemm=true}}, or {STATIC}",
        lambda f: _captures_dropless(f) and f.fp8 and not f.moe_grouped_gemm,
    ),
    Rule(
        "fp8 moe_token_dispatcher_type moe_expert_capacity_factor: HybridEP pads quantized rows to "
        f"counts on the host; use {{moe_token_dispatcher_type=alltoall}}, or {STATIC}",
        lambda f: _captures_dropless(f) and f.fp8 and f.moe_token_dispatcher_type == "flex",
    ),
    Rule(
        "fp4 moe_expert_capacity_factor: Megatron pads quantized rows to counts that it reads on "
        f"the host; train without FP4, or {STATIC}",
        lambda f: _captures_dropless(f) and f.fp4,
    ),
    Rule(
        "bf16 moe_expert_capacity_factor: the grouped GEMM of graphs on a GPU multiplies numbers "
        f"of 16 bits; use {{bf16=true}}, or {STATIC}",
        lambda f: _captures_dropless(f) and f.on_gpu and f.element_bytes != 2,
    ),
    Rule(
        "moe_pad_expert_input_to_capacity moe_expert_capacity_factor: experts would drop tokens "
        "and still get inputs of any size, but a graph has fixed shapes; use "
        "{moe_pad_expert_input_to_capacity=true}, or leave {moe_expert_capacity_factor=} out (no "
        "token is dropped)",
        _with_capacity(lambda f: not f.moe_pad_expert_input_to_capacity),
    ),
    Rule(
        "moe_expert_capacity_factor: below 1, tokens are dropped in every step; raise it, or use "
        "{token_drops=count} if that is intended",
        _with_capacity(lambda f: f.moe_expert_capacity_factor < 1 and f.token_drops != "count"),
    ),
    Rule(
        "moe_expert_capacity_factor: above {num_moe_experts=} / {moe_router_topk=} ({enough}) an "
        "expert would have room for more tokens than exist, which Megatron's permutation does not "
        "support; {enough} has room for all",
        _with_capacity(
            lambda f: f.moe_expert_capacity_factor > _enough(f) and {"enough": f"{_enough(f):g}"}
        ),
    ),
    Rule(
        "token_drops fp8: a step that runs again would update the scales twice; use "
        "{token_drops=raise}, or train without FP8",
        lambda f: f.num_moe_experts and f.token_drops == "rerun" and f.fp8,
    ),
    *HYBRID_EP_RULES,
)
