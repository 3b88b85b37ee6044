"""Refuse, in `attach`, the settings of Megatron that a chunk graph cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.data_parallel import is_fully_sharded
from chunkgraph.megatron.core.fp8_recipe import fp8_recipe
from chunkgraph.megatron.core.random_state import rng_is_graph_safe

__all__ = [
    "GRAPH_SAFE_RNG",
    "model_refusals",
    "recompute_refusals",
    "refuse_model",
    "refused_settings",
]

GRAPH_SAFE_RNG = (
    "seed with model_parallel_cuda_manual_seed(seed, te_rng_tracker=True) or "
    "use_cudagraphable_rng=True"
)
"""Advice on random states that a graph can switch."""


@dataclass(frozen=True)
class _Refusal:
    """A setting of Megatron's config that a chunk graph cannot honour.

    Attributes:
        field: Name of the field in TransformerConfig; a release may lack it.
        is_on: Whether a value of the field turns the refused feature on.
        why: The consequence in a graph.
    """

    field: str
    is_on: Callable[[Any], bool]
    why: str


def _is_above_1(value: Any) -> bool:
    return (value or 1) > 1


_GATHERED_WEIGHTS = "Python hooks gather the weights for every use, and a replay does not run hooks"
_QUANTIZED_WEIGHTS = (
    "Python state decides whether to update the cached quantized weights, and a replay freezes it"
)
_PRIMARY_WEIGHTS = (
    "the optimizer writes FP8 weights, and Python code updates their outdated transposes, which a "
    "replay does not do"
)
_FP8_ATTENTION = "Python code copies and sets the scales of its FP8 tensors in every call"
_REFUSALS = (
    _Refusal("fp4", bool, _QUANTIZED_WEIGHTS),
    _Refusal("use_kitchen", bool, _QUANTIZED_WEIGHTS),
    _Refusal("quant_recipe", bool, _QUANTIZED_WEIGHTS),
    _Refusal("fp8_param", bool, _PRIMARY_WEIGHTS),
    _Refusal("fp8_param_gather", bool, _PRIMARY_WEIGHTS),
    _Refusal("fp8_dot_product_attention", bool, _FP8_ATTENTION),
    _Refusal("fp8_multi_head_attention", bool, _FP8_ATTENTION),
    _Refusal(
        "distribute_saved_activations",
        bool,
        "recomputation would replace the slot's input by this rank's part of it",
    ),
    _Refusal("cpu_offloading", bool, "its queues are Python state that a replay does not advance"),
    _Refusal(
        "fine_grained_activation_offloading",
        bool,
        "its queues are Python state that a replay does not advance",
    ),
    _Refusal(
        "overlap_moe_expert_parallel_comm", bool, "its schedule does not call the block's forward"
    ),
    _Refusal("delay_wgrad_compute", bool, "weight gradients would be computed outside the graph"),
    _Refusal(
        "hybrid_context_parallel", bool, "its schedule changes the process group between forwards"
    ),
    _Refusal("variable_seq_lengths", bool, "a graph has fixed shapes"),
    _Refusal(
        "enable_autocast",
        bool,
        "captures run outside of it and would contain operators of full precision",
    ),
    _Refusal(
        "num_microbatches_with_partial_activation_checkpoints",
        lambda v: v is not None,
        "only some microbatches of a chunk would recompute, but a slot has one graph",
    ),
    _Refusal("gtp_weight_remat_size", _is_above_1, _GATHERED_WEIGHTS),
    _Refusal("expert_gtp_weight_remat_size", _is_above_1, _GATHERED_WEIGHTS),
    _Refusal(
        "experimental_attention_variant",
        lambda v: v == "dsa",
        "every microbatch sets the scale of its indexer's loss to another tensor",
    ),
    _Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        bool,
        "weight gradients would be computed outside the graph",
    ),
    _Refusal("moe_hybridep_pad_uneven_dispatch_inputs", bool, "it reads token counts on the host"),
    _Refusal(
        "cuda_graph_impl",
        lambda v: v not in (None, "none"),
        "Megatron would capture the same layers again",
    ),
    _Refusal("enable_cuda_graph", bool, "Megatron would capture the same layers again"),
    _Refusal("external_cuda_graph", bool, "another graph owner would capture the same layers"),
)


def refused_settings(config: Any) -> list[str]:
    """List the settings in ``config`` that a chunk graph cannot honour, each with its reason.

    Args:
        config: An object that has all or some fields of TransformerConfig as attributes.
    """
    refusals = [
        f"{refusal.field}={getattr(config, refusal.field)!r}: {refusal.why}"
        for refusal in _REFUSALS
        if refusal.is_on(getattr(config, refusal.field, None))
    ]
    fuses, experts = (
        getattr(config, name, None)
        for name in ("use_transformer_engine_op_fuser", "num_moe_experts")
    )
    if fuses and not experts and fp8_recipe(config) is None:
        refusals.append(
            "use_transformer_engine_op_fuser=True without experts: fused operations hold their own "
            "parameters, which is supported for experts only; leave it out"
        )
    if getattr(config, "test_mode", False) and getattr(config, "qk_layernorm", False):
        refusals.append(
            "test_mode=True with qk_layernorm=True: every forward compares the norms of all "
            "data-parallel ranks on the host; leave test_mode out"
        )
    return refusals


def model_refusals(
    config: Any, model_chunks: Sequence[nn.Module], device: torch.device
) -> list[str]:
    """List the reasons, other than those of features, that a graph cannot hold the model.

    Args:
        config: Megatron's TransformerConfig.
        model_chunks: The chunks as the schedule receives them, with their wrappers.
        device: Device of the parameters.
    """
    refusals = refused_settings(config)
    if (
        len(model_chunks) > 1
        and getattr(config, "pipeline_model_parallel_size", 1) == 2
        and getattr(config, "batch_p2p_comm", False)
        and not getattr(config, "overlap_p2p_comm", False)
    ):
        refusals.append(
            "batch_p2p_comm without overlap_p2p_comm in an interleaved pipeline of 2 ranks: each "
            "batch has two sends between the same ranks, and activations and gradients are swapped "
            "(with or without chunk graphs); set overlap_p2p_comm=True"
        )
    if any(is_fully_sharded(chunk) for chunk in model_chunks):
        refusals.append("FSDP: parameters move, and a graph remembers their addresses")
    if device.type == "cuda":
        refusals += recompute_refusals(config, is_rng_graph_safe=rng_is_graph_safe())
    dropout = max(
        getattr(config, "hidden_dropout", 0.0) or 0.0,
        getattr(config, "attention_dropout", 0.0) or 0.0,
    )
    if dropout > 0 and not rng_is_graph_safe():
        refusals.append(
            f"dropout {dropout} with an RNG tracker that is not graph-safe: every replay would "
            f"draw the same mask; {GRAPH_SAFE_RNG} (parameters are on {device})"
        )
    return refusals


def refuse_model(refusals: Sequence[str]) -> None:
    """Refuse a model if ``refusals`` is not empty.

    Raises:
        ConfigError: There are refusals; the message lists all of them.
    """
    if refusals:
        raise ConfigError(
            "Chunk graphs cannot hold this model:\n  - "
            + "\n  - ".join(refusals)
            + "\nTurn these off, or train without chunk graphs."
        )


def recompute_refusals(config: Any, *, is_rng_graph_safe: bool) -> list[str]:
    """List the reasons that a CUDA graph cannot hold the configured recomputation.

    Args:
        config: An object that has all or some fields of TransformerConfig as attributes.
        is_rng_graph_safe: Whether a graph can switch the states of the RNG tracker.
    """
    granularity = getattr(config, "recompute_granularity", None)
    if granularity is None:
        return []
    if not is_rng_graph_safe:
        refusal = (
            f"recompute_granularity={granularity!r} with an RNG tracker that is not graph-safe: "
            f"recomputation would read the random state in a capture; {GRAPH_SAFE_RNG}"
        )
        return [refusal]
    recomputed = {
        "attention_dropout": granularity == "full"
        or "core_attn" in (getattr(config, "recompute_modules", None) or ()),
        "hidden_dropout": granularity == "full",
    }
    return [
        f"recompute_granularity={granularity!r} with {name}={getattr(config, name)}: the "
        "recomputation must draw the mask of the forward again, but a graph cannot reset the "
        "states of graph-safe generators (Megatron's eager recomputation does not reset them "
        "either: its masks differ); set it to 0 or recompute modules without dropout "
        "(recompute_modules)"
        for name, is_recomputed in recomputed.items()
        if is_recomputed and (getattr(config, name, 0.0) or 0.0) > 0
    ]
