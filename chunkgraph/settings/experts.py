"""The section ``moe`` and its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from chunkgraph._text import shown
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.settings.deep_ep import check_flex
from chunkgraph.settings.setting import NOT_NEGATIVE, POSITIVE, setting

if TYPE_CHECKING:
    from chunkgraph.settings.config import Config

__all__ = ["ExpertConfig", "check_experts"]


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
    moe_flex_dispatcher_backend: Literal["hybridep", "deepep"] | None = setting(
        None,
        help="Backend of the flex dispatcher: DeepEP's HybridEP (hybridep), or DeepEP within a "
        "node (deepep). Null without flex.",
        megatron="--moe-flex-dispatcher-backend",
        needs="moe.num_moe_experts",
    )
    moe_expert_rank_capacity_factor: float | None = setting(
        None,
        help="With flex, rows that the experts of a rank have room for together, as a multiple of "
        "the tokens of a microbatch times moe_router_topk.",
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
        "the device; flex needs it.",
        megatron="--use-transformer-engine-op-fuser",
        needs="moe.num_moe_experts",
    )
    token_drops: Literal["warn", "count", "raise", "rerun"] = setting(
        "warn",
        help="What to do about tokens that an expert (with flex, a rank) has no room for, which "
        "Megatron drops: count them and warn once, and refuse capacity factors below 1 (warn); "
        "only count them (count); raise an error (raise); or rerun the step eagerly with room for "
        "all tokens and recapture with more room (rerun). flex supports raise and rerun only.",
        flag="--cuda-graph-token-drops",
        needs="moe.num_moe_experts",
    )


def check_experts(config: Config) -> None:
    """Check the section ``moe`` and ``pipeline.expert_model_parallel_size``.

    Raises:
        ConfigError: A value is out of range, or two settings cannot go together.
        TopologyError: The experts cannot be shared out.
    """
    moe, pipeline = config.moe, config.pipeline
    ranks = pipeline.expert_model_parallel_size
    if moe.num_moe_experts is None:
        if ranks > 1:
            raise TopologyError(
                f"pipeline.expert_model_parallel_size is {ranks}, but moe.num_moe_experts is null: "
                "there are no experts to share. Set one of them."
            )
        return
    if moe.moe_router_topk > moe.num_moe_experts:
        raise ConfigError(
            f"moe.moe_router_topk ({moe.moe_router_topk}) is larger than moe.num_moe_experts "
            f"({moe.num_moe_experts})."
        )
    if moe.num_moe_experts % ranks:
        raise TopologyError(
            f"moe.num_moe_experts ({moe.num_moe_experts}) is not divisible by "
            f"pipeline.expert_model_parallel_size ({ranks}); every rank holds as many experts. "
            "Change one of them."
        )
    if pipeline.data_parallel_size % ranks:
        raise TopologyError(
            f"pipeline.expert_model_parallel_size ({ranks}) does not divide "
            f"pipeline.data_parallel_size ({pipeline.data_parallel_size}); the ranks that share "
            "the experts are copies of the rest of the model. Change one of them."
        )
    if pipeline.tensor_model_parallel_size > 1 and not pipeline.sequence_parallel:
        raise TopologyError(
            "pipeline.tensor_model_parallel_size is "
            f"{pipeline.tensor_model_parallel_size}: Megatron trains experts on several "
            "tensor-parallel ranks only with sequence parallelism. Set "
            "pipeline.sequence_parallel=true."
        )
    frequency, num_layers = moe.moe_layer_freq, config.model.num_layers
    if frequency is not None and (len(frequency) != num_layers or set(frequency) - {0, 1}):
        raise ConfigError(
            f"moe.moe_layer_freq is {shown(list(frequency))}; it has one number for each of the "
            f"{num_layers} layers of the model, 1 (experts) or 0 (feed-forward)."
        )
    check_flex(config)
    if moe.moe_token_dispatcher_type != "flex" and moe.moe_expert_capacity_factor is not None:
        _check_capacity(moe, moe.num_moe_experts, moe.moe_expert_capacity_factor)
    if moe.token_drops == "rerun" and config.model.fp8 is not None:
        raise ConfigError(
            f"moe.token_drops is rerun with model.fp8={config.model.fp8}: a step that is run anew "
            "would update the scales a second time. Set token_drops to raise, or fp8 to null."
        )
    _check_router(moe, moe.num_moe_experts)


def _check_capacity(moe: ExpertConfig, num_experts: int, factor: float) -> None:
    enough = num_experts / moe.moe_router_topk
    if not moe.moe_pad_expert_input_to_capacity:
        raise ConfigError(
            "moe.moe_pad_expert_input_to_capacity is false with moe.moe_expert_capacity_factor="
            f"{factor:g}: experts would drop tokens and still get inputs of any size, and a graph "
            "has fixed shapes. Set it to true, or the capacity to null (no token is dropped)."
        )
    if factor < 1 and moe.token_drops != "count":
        raise ConfigError(
            f"moe.moe_expert_capacity_factor is {factor}: below 1 tokens are dropped in every "
            "step. Raise it, or set moe.token_drops=count if that is meant."
        )
    if factor > enough:
        raise ConfigError(
            f"moe.moe_expert_capacity_factor is {factor}, but {enough:g} (num_moe_experts / "
            "moe_router_topk) has room for all tokens already; Megatron-core cannot do more."
        )


def _check_router(moe: ExpertConfig, num_experts: int) -> None:
    if moe.moe_router_enable_expert_bias and moe.moe_router_score_function != "sigmoid":
        raise ConfigError(
            "moe.moe_router_enable_expert_bias needs moe.moe_router_score_function=sigmoid."
        )
    if (
        moe.moe_router_topk == 1
        and moe.moe_router_score_function == "softmax"
        and not moe.moe_router_pre_softmax
    ):
        raise ConfigError(
            "moe.moe_router_topk is 1: the softmax over one expert is always 1, and the router "
            "would not train. Set moe.moe_router_pre_softmax=true."
        )
    groups, chosen = moe.moe_router_num_groups, moe.moe_router_group_topk
    if (groups is None) != (chosen is None):
        raise ConfigError(
            "moe.moe_router_num_groups and moe.moe_router_group_topk go together: give both, or "
            "neither."
        )
    if groups is not None and chosen is not None and (num_experts % groups or chosen > groups):
        raise ConfigError(
            f"moe.moe_router_num_groups is {groups} and moe.moe_router_group_topk {chosen}: the "
            f"{num_experts} experts must form groups of equal size, and no more of them be used "
            "than there are."
        )
