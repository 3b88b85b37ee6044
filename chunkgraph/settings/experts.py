"""The section ``moe`` and its rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from chunkgraph.errors import TopologyError
from chunkgraph.settings.deep_ep import HYBRID_EP_RULES, STATIC
from chunkgraph.settings.rule import Facts, Rule
from chunkgraph.settings.setting import NOT_NEGATIVE, POSITIVE, setting

__all__ = ["EXPERT_FILE_RULES", "EXPERT_RULES", "ExpertConfig", "uses_dropless"]


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """The experts that replace feed-forward layers (mixture of experts)."""

    num_moe_experts: int | None = setting(
        None,
        help="Experts per layer, over all expert-parallel ranks. Null: no experts.",
        bounds=POSITIVE,
        megatron="--num-experts",
    )
    moe_router_topk: int = setting(
        2,
        help="Experts per token.",
        bounds=POSITIVE,
        megatron="--moe-router-topk",
        needs="moe.num_moe_experts",
    )
    moe_ffn_hidden_size: int | None = setting(
        None,
        help="Width of each expert, in elements. Null: model.ffn_hidden_size.",
        bounds=POSITIVE,
        megatron="--moe-ffn-hidden-size",
        needs="moe.num_moe_experts",
    )
    moe_expert_capacity_factor: float | None = setting(
        None,
        help="Capacity of an expert, as a multiple of its tokens under even load. num_moe_experts "
        "/ moe_router_topk has room for all tokens. Null: no token is dropped (dropless). Must be "
        "null with the flex dispatcher.",
        bounds=POSITIVE,
        megatron="--moe-expert-capacity-factor",
        needs="moe.num_moe_experts",
    )
    moe_pad_expert_input_to_capacity: bool = setting(
        True,
        help="Pad an expert's input to its capacity, so that its shape is fixed. Used with a "
        "capacity only.",
        megatron="--moe-pad-expert-input-to-capacity",
        needs="moe.num_moe_experts",
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = setting(
        "alltoall",
        help="How tokens reach the ranks of their experts.",
        megatron="--moe-token-dispatcher-type",
        needs="moe.num_moe_experts",
    )
    moe_flex_dispatcher_backend: Literal["hybridep"] | None = setting(
        None,
        help="Backend of the flex dispatcher: DeepEP's HybridEP. Null without flex.",
        megatron="--moe-flex-dispatcher-backend",
        needs="moe.num_moe_experts",
    )
    moe_expert_rank_capacity_factor: float | None = setting(
        None,
        help="With flex, rows that the experts of a rank have room for together, as a multiple of "
        "the tokens of a microbatch times moe_router_topk. A step that needs more runs again. "
        "Null: by the loads of eager steps.",
        megatron="--moe-expert-rank-capacity-factor",
        needs="moe.num_moe_experts",
    )
    moe_aux_loss_coeff: float = setting(
        0.0,
        help="Weight of the loss that balances the load of experts.",
        bounds=NOT_NEGATIVE,
        megatron="--moe-aux-loss-coeff",
        needs="moe.num_moe_experts",
    )
    moe_z_loss_coeff: float | None = setting(
        None,
        help="Weight of the loss that keeps router logits small. Null: no such loss.",
        bounds=NOT_NEGATIVE,
        megatron="--moe-z-loss-coeff",
        needs="moe.num_moe_experts",
    )
    moe_router_load_balancing_type: Literal[
        "aux_loss", "seq_aux_loss", "global_aux_loss", "none"
    ] = setting(
        "aux_loss",
        help="What loads are balanced over: a microbatch (aux_loss), each sequence (seq_aux_loss), "
        "or the microbatches of a step (global_aux_loss).",
        megatron="--moe-router-load-balancing-type",
        needs="moe.num_moe_experts",
    )
    moe_layer_freq: tuple[int, ...] | None = setting(
        None,
        help="For each layer, 1 (experts) or 0 (feed-forward). Null: experts in every layer.",
        megatron="--moe-layer-freq",
        needs="moe.num_moe_experts",
    )
    moe_shared_expert_intermediate_size: int | None = setting(
        None,
        help="Total width of the shared experts, in elements. Null: no shared experts.",
        bounds=POSITIVE,
        megatron="--moe-shared-expert-intermediate-size",
        needs="moe.num_moe_experts",
    )
    moe_router_enable_expert_bias: bool = setting(
        False,
        help="Add a load-dependent bias when choosing experts. Needs sigmoid scores.",
        megatron="--moe-router-enable-expert-bias",
        needs="moe.num_moe_experts",
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = setting(
        "softmax",
        help="Function that turns router logits into scores.",
        megatron="--moe-router-score-function",
        needs="moe.num_moe_experts",
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = setting(
        None,
        help="Type of the router's arithmetic; flex needs fp32. Null: the type of the model.",
        megatron="--moe-router-dtype",
        needs="moe.num_moe_experts",
    )
    moe_router_pre_softmax: bool = setting(
        False,
        help="Compute scores over all experts instead of the chosen ones.",
        megatron="--moe-router-pre-softmax",
        needs="moe.num_moe_experts",
    )
    moe_router_num_groups: int | None = setting(
        None,
        help="Groups of experts, of which a token may use only some. Null: no groups.",
        bounds=POSITIVE,
        megatron="--moe-router-num-groups",
        needs="moe.num_moe_experts",
    )
    moe_router_group_topk: int | None = setting(
        None,
        help="Groups that a token may use.",
        bounds=POSITIVE,
        megatron="--moe-router-group-topk",
        needs="moe.num_moe_experts",
    )
    moe_grouped_gemm: bool = setting(
        False,
        help="Multiply the experts of a rank in one grouped GEMM. Needs Transformer Engine's "
        "layers.",
        megatron="--moe-grouped-gemm",
        needs="moe.num_moe_experts",
    )
    use_transformer_engine_op_fuser: bool = setting(
        False,
        help="Run the experts as one Transformer Engine operation that reads the token counts on "
        "the device; Megatron asks for it next to moe_expert_rank_capacity_factor.",
        megatron="--use-transformer-engine-op-fuser",
        needs="moe.num_moe_experts",
    )
    token_drops: Literal["warn", "count", "raise", "rerun"] = setting(
        "warn",
        help="What to do about tokens that an expert with a capacity has no room for, which "
        "Megatron drops: count them and warn once, and refuse capacity factors below 1 (warn); "
        "only count them (count); raise an error (raise); or rerun the step eagerly with room for "
        "all tokens and recapture with more room (rerun).",
        flag="--cuda-graph-token-drops",
        needs="moe.num_moe_experts",
    )


def _enough(f: Facts) -> float:
    """Return the capacity factor that has room for all tokens."""
    return float(f.num_moe_experts / (f.moe_router_topk or 1))


def uses_dropless(model: Any) -> bool:
    """Return whether experts take all tokens, without a capacity.

    Args:
        model: `Facts`, or a TransformerConfig.
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


def _has_uneven_groups(f: Facts) -> bool:
    groups, chosen = f.moe_router_num_groups, f.moe_router_group_topk
    return bool(groups and chosen) and (f.num_moe_experts % groups > 0 or chosen > groups)


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
"""Rules of a model with experts, from a file, a program or a command line."""


def _has_experts(when: Callable[[Facts], object]) -> Callable[[Facts], object]:
    return lambda f: f.num_moe_experts is not None and when(f)


EXPERT_FILE_RULES = (
    Rule(
        "expert_model_parallel_size num_moe_experts: there are no experts to split; change one of "
        "them",
        lambda f: f.num_moe_experts is None and f.expert_model_parallel_size > 1,
        TopologyError,
    ),
    Rule(
        "moe_router_topk num_moe_experts: a token cannot go to more experts than there are",
        _has_experts(lambda f: f.moe_router_topk > f.num_moe_experts),
    ),
    Rule(
        "expert_model_parallel_size data_parallel_size: data-parallel ranks split the experts, so "
        "the former must divide the latter; change one of them",
        _has_experts(lambda f: f.data_parallel_size % f.expert_model_parallel_size),
        TopologyError,
    ),
    Rule(
        "num_moe_experts tensor_model_parallel_size: Megatron trains experts on several "
        "tensor-parallel ranks only with sequence parallelism; use {sequence_parallel=true}",
        _has_experts(lambda f: f.tensor_model_parallel_size > 1 and not f.sequence_parallel),
        TopologyError,
    ),
    Rule(
        "moe_layer_freq num_layers: the former needs one number for each layer of the model, 1 "
        "(experts) or 0 (feed-forward)",
        _has_experts(
            lambda f: (
                f.moe_layer_freq is not None
                and (len(f.moe_layer_freq) != f.num_layers or set(f.moe_layer_freq) - {0, 1})
            )
        ),
    ),
    Rule(
        "moe_router_enable_expert_bias moe_router_score_function: the bias is added only to "
        "sigmoid scores; use {moe_router_score_function=sigmoid}",
        _has_experts(
            lambda f: f.moe_router_enable_expert_bias and f.moe_router_score_function != "sigmoid"
        ),
    ),
    Rule(
        "moe_router_topk: the softmax over one expert is always 1, so the router would not "
        "train; use {moe_router_pre_softmax=true}",
        _has_experts(
            lambda f: (
                f.moe_router_topk == 1
                and f.moe_router_score_function == "softmax"
                and not f.moe_router_pre_softmax
            )
        ),
    ),
    Rule(
        "moe_router_num_groups moe_router_group_topk: the two go together; set both, or neither",
        _has_experts(
            lambda f: (f.moe_router_num_groups is None) != (f.moe_router_group_topk is None)
        ),
    ),
    Rule(
        "moe_router_num_groups moe_router_group_topk: the former must divide {num_moe_experts}, "
        "and the latter must not exceed it",
        _has_experts(_has_uneven_groups),
    ),
)
"""Rules of a configuration file only."""
