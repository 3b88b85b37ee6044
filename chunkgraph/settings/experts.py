"""What the settings of experts must satisfy, by themselves and together with the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from chunkgraph._text import shown
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.settings.deep_ep import check_flex

if TYPE_CHECKING:
    from chunkgraph.settings.config import Config, ExpertConfig

__all__ = ["check_experts"]


def check_experts(config: Config) -> None:
    """Check the section ``moe`` and ``pipeline.expert_model_parallel_size``.

    Raises:
        ConfigError: A value is out of range, or two settings cannot go together.
        TopologyError: The experts cannot be shared out.
    """
    moe, pipeline = config.moe, config.pipeline
    ranks = pipeline.expert_model_parallel_size
    _check_ranges(moe)
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
    has_room_for_what_comes = (
        not config.capture.enabled
        and moe.moe_expert_capacity_factor is None
        and not moe.moe_pad_expert_input_to_capacity
    )
    if moe.moe_token_dispatcher_type != "flex" and not has_room_for_what_comes:
        _check_capacity(moe, moe.num_moe_experts)
    if has_room_for_what_comes and pipeline.expert_model_parallel_size > 1:
        _check_sizes_on_host(config)
    if moe.token_drops == "rerun" and config.model.fp8 is not None:
        raise ConfigError(
            f"moe.token_drops is rerun with model.fp8={config.model.fp8}: a step that is run anew "
            "would update the scales a second time. Set token_drops to raise, or fp8 to null."
        )
    _check_router(moe, moe.num_moe_experts)


def _check_sizes_on_host(config: Config) -> None:
    """Megatron sends rows by numbers that it fetches from GPUs alone."""
    if config.device == "cpu" and config.moe.moe_token_dispatcher_type == "alltoall":
        raise ConfigError(
            "moe.moe_expert_capacity_factor is null with device cpu, alltoall and "
            f"pipeline.expert_model_parallel_size={config.pipeline.expert_model_parallel_size}: "
            "Megatron's dispatcher wants a GPU for that. Set the size to 1, or give a capacity."
        )


def _check_ranges(moe: ExpertConfig) -> None:
    positive: dict[str, float | None] = {
        "moe.num_moe_experts": moe.num_moe_experts,
        "moe.moe_router_topk": moe.moe_router_topk,
        "moe.moe_ffn_hidden_size": moe.moe_ffn_hidden_size,
        "moe.moe_expert_capacity_factor": moe.moe_expert_capacity_factor,
        "moe.moe_shared_expert_intermediate_size": moe.moe_shared_expert_intermediate_size,
        "moe.moe_router_num_groups": moe.moe_router_num_groups,
        "moe.moe_router_group_topk": moe.moe_router_group_topk,
    }
    for path, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{path} is {value}; it must be greater than 0.")
    for path, value in {
        "moe.moe_aux_loss_coeff": moe.moe_aux_loss_coeff,
        "moe.moe_z_loss_coeff": moe.moe_z_loss_coeff,
    }.items():
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{path} is {value}; it must be 0 or greater.")


def _check_capacity(moe: ExpertConfig, num_experts: int) -> None:
    factor = moe.moe_expert_capacity_factor
    enough = num_experts / moe.moe_router_topk
    if factor is None or not moe.moe_pad_expert_input_to_capacity:
        raise ConfigError(
            "moe.moe_expert_capacity_factor and moe.moe_pad_expert_input_to_capacity=true are "
            "needed with experts: without them the shapes in a layer depend on the tokens, and a "
            f"graph has fixed ones. A factor of {enough:g} (num_moe_experts / moe_router_topk) "
            "has room for all tokens; a smaller one drops some when the loads are uneven. Without "
            "graphs (capture.enabled=false) set the one to null and the other to false."
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
