"""Megatron's settings and layer specs of a model with experts, from a configuration."""

from __future__ import annotations

from typing import Any

from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.settings import Config

__all__ = ["expert_block_spec", "expert_settings", "rank_capacity_factor"]


def expert_settings(config: Config, *, is_local: bool) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig for experts; none without experts.

    Args:
        config: the run.
        is_local: whether layers are Megatron's local ones, whose experts have no grouped GEMM on a
            CPU.
    """
    moe = config.moe
    if moe.num_moe_experts is None:
        return {}
    is_flex = moe.moe_token_dispatcher_type == "flex"
    settings = moe.model_dump(exclude={"token_drops", "moe_expert_rank_capacity_factor"})
    if is_flex:
        # Fields that some releases do not have.
        settings |= {
            "moe_flex_dispatcher_backend": "hybridep",
            "moe_expert_rank_capacity_factor": rank_capacity_factor(config),
            "moe_router_dtype": "fp32",
            "use_transformer_engine_op_fuser": moe.moe_expert_rank_capacity_factor is not None,
        }
    return {
        **settings,
        "moe_pad_expert_input_to_capacity": moe.moe_expert_capacity_factor is not None
        and not is_flex,
        "moe_grouped_gemm": not is_local,
        # The softmax over one chosen expert is always 1, so the router would not train.
        "moe_router_pre_softmax": moe.moe_router_topk == 1,
        "moe_layer_freq": 1 if moe.moe_layer_freq is None else list(moe.moe_layer_freq),
        "moe_ffn_hidden_size": moe.moe_ffn_hidden_size or config.model.ffn_hidden_size,
        "expert_model_parallel_size": config.pipeline.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
    }


def rank_capacity_factor(config: Config) -> float | None:
    """Return the rank budget; None without graphs, which count the tokens that it drops."""
    return config.moe.moe_expert_rank_capacity_factor if config.capture.enabled else None


def expert_block_spec(
    config: Config, transformer_config: Any, index: int, *, use_transformer_engine: bool
) -> Any:
    """Return the spec of one chunk's block, which may mix layers with and without experts.

    Args:
        config: the run.
        transformer_config: Megatron's.
        index: index of the model chunk on this rank.
        use_transformer_engine: whether to use Transformer Engine's layers or Megatron's local ones.
    """
    make = import_megatron("megatron.core.models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec
    return make(
        transformer_config,
        use_transformer_engine=use_transformer_engine,
        normalization=config.model.normalization,
        vp_stage=index if config.pipeline.num_model_chunks > 1 else None,
    )
