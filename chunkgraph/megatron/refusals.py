"""Rules about the settings of Megatron that a chunk graph cannot hold, and the facts of a model.

A rule that a configuration file shares is declared with the section of its settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chunkgraph.megatron.core.model_kinds import fp8_recipe
from chunkgraph.megatron.rules.features import RECOMPUTE_RULES, SLOT_RULES
from chunkgraph.settings.rule import Facts, Rule, Words
from chunkgraph.settings.words import PROGRAM

_GATHERED_WEIGHTS = "Python hooks gather the weights for every use, and a replay does not run hooks"
_QUANTIZED_WEIGHTS = (
    "Python state decides whether to update the cached quantized weights, and a replay freezes it"
)
_FP8_ATTENTION = "Python code copies and sets the scales of its FP8 tensors in every call"
_QUEUES = "its queues are Python state that a replay does not advance; use {max_slot_memory=}"
_OUTSIDE = "weight gradients would be computed outside the graph"
_SAFE_RNG = "use {te_rng_tracker=true}"


def _drives(f: Facts) -> bool:
    return f.schedule not in (None, "auto")


def _next_to_schedule(name: str) -> Rule:
    text = f"{name} schedule: only Megatron's own schedules do it; leave one of them out"
    return Rule(text, lambda f: _drives(f) and getattr(f, name))


_RING_EXCHANGE = _next_to_schedule("use_ring_exchange_p2p")
DELAY_RULES = (
    Rule(
        # The launcher trains without it where Megatron allows it: next to overlapped transfers.
        f"delay_wgrad_compute: {_OUTSIDE}, unless a schedule splits backwards",
        lambda f: (
            f.delay_wgrad_compute
            and not f.splits_backward
            and (f.is_attached or not f.overlap_moe_expert_parallel_comm)
        ),
    ),
    Rule(
        "schedule delay_wgrad_compute: layers of Transformer Engine would compute their weight "
        "gradients with the input gradients; set it to True on Megatron's config, after the config "
        "is created and before the model is built, and in DistributedDataParallelConfig",
        lambda f: f.splits_backward and f.layers_at_once,
    ),
    Rule(
        "schedule ddp_at_once: DDP would take weight gradients before the layers compute them; "
        "create DistributedDataParallelConfig with delay_wgrad_compute=True",
        lambda f: f.splits_backward and f.ddp_at_once,
    ),
    Rule(
        "schedule use_transformer_engine_op_fuser: fused operations do not compute their weight "
        "gradients separately; leave one of them out",
        lambda f: f.splits_backward and f.use_transformer_engine_op_fuser,
    ),
)
"""Rules of weight gradients that layers delay until the action W."""
DRIVER_RULES = (
    _next_to_schedule("fine_grained_activation_offloading"),
    _next_to_schedule("hybrid_context_parallel"),
    _next_to_schedule("num_microbatches_with_partial_activation_checkpoints"),
    _next_to_schedule("overlap_moe_expert_parallel_comm"),
    _next_to_schedule("variable_seq_lengths"),
    _RING_EXCHANGE,
    Rule(
        "cuda_graph_impl schedule: Megatron's graphs follow its own schedules; leave one of them "
        "out",
        lambda f: _drives(f) and f.cuda_graph_impl not in (None, "none"),
    ),
)
"""Rules of a schedule that drives a model without chunk graphs."""
MODEL_RULES = (
    *SLOT_RULES,
    *RECOMPUTE_RULES,
    Rule(f"fp4: {_QUANTIZED_WEIGHTS}"),
    Rule(f"use_kitchen: {_QUANTIZED_WEIGHTS}"),
    Rule(f"quant_recipe: {_QUANTIZED_WEIGHTS}"),
    Rule(f"fp8_dot_product_attention: {_FP8_ATTENTION}"),
    Rule(f"fp8_multi_head_attention: {_FP8_ATTENTION}"),
    Rule(
        "distribute_saved_activations: recomputation would replace the slot's input by this "
        "rank's part of it"
    ),
    Rule(f"cpu_offloading: {_QUEUES}"),
    # The launcher trains without the next two.
    Rule(
        f"fine_grained_activation_offloading: {_QUEUES}",
        lambda f: f.is_attached and f.fine_grained_activation_offloading,
    ),
    Rule(
        "overlap_moe_expert_parallel_comm: its schedule does not call the block's forward",
        lambda f: f.is_attached and f.overlap_moe_expert_parallel_comm,
    ),
    *DELAY_RULES,
    Rule("hybrid_context_parallel: its schedule changes the process group between forwards"),
    Rule(
        "enable_autocast: captures run outside of it and would contain operators of full precision"
    ),
    Rule(
        "num_microbatches_with_partial_activation_checkpoints: only some microbatches of a chunk "
        "would recompute, but a slot has one graph",
        lambda f: f.num_microbatches_with_partial_activation_checkpoints is not None,
    ),
    Rule(
        f"gtp_weight_remat_size: {_GATHERED_WEIGHTS}", lambda f: (f.gtp_weight_remat_size or 1) > 1
    ),
    Rule(
        f"expert_gtp_weight_remat_size: {_GATHERED_WEIGHTS}",
        lambda f: (f.expert_gtp_weight_remat_size or 1) > 1,
    ),
    Rule(f"overlap_dispatch_backward_with_experts_wgrad: {_OUTSIDE}"),
    Rule("moe_hybridep_pad_uneven_dispatch_inputs: it reads token counts on the host"),
    Rule(
        "cuda_graph_impl: Megatron would capture the same layers again; leave it out",
        lambda f: f.cuda_graph_impl not in (None, "none"),
    ),
    Rule(
        "use_transformer_engine_op_fuser: without experts fused operations hold their own "
        "parameters, which is supported for experts only; leave it out",
        lambda f: f.use_transformer_engine_op_fuser and not f.num_moe_experts and not f.fp8_recipe,
    ),
    Rule(
        "batch_p2p_comm overlap_p2p_comm: in an interleaved pipeline of 2 ranks each batch has "
        "two sends between the same ranks, and activations and gradients are swapped (with or "
        "without chunk graphs); use {overlap_p2p_comm=true}",
        lambda f: (
            (f.num_model_chunks or 1) > 1
            and f.pipeline_model_parallel_size == 2
            and f.batch_p2p_comm
            and not f.overlap_p2p_comm
        ),
    ),
    _RING_EXCHANGE,
    Rule("is_fully_sharded: parameters move, and a graph remembers their addresses"),
    Rule(
        "recompute_granularity: the RNG tracker is not graph-safe, and recomputation would read "
        f"the random state in a capture; {_SAFE_RNG}",
        lambda f: f.recompute_granularity and f.on_gpu and not f.is_rng_graph_safe,
    ),
    Rule(
        "hidden_dropout attention_dropout moe_router_force_load_balancing: the RNG tracker is not "
        f"graph-safe, and every replay would draw the same numbers; {_SAFE_RNG}",
        lambda f: (
            (f.hidden_dropout or f.attention_dropout or f.moe_router_force_load_balancing)
            and not f.is_rng_graph_safe
        ),
    ),
)


def facts_of_model(
    config: Any, others: Mapping[str, object] | None = None, words: Words = PROGRAM
) -> Facts:
    """Return the facts of a model.

    Args:
        config: An object that has all or some fields of TransformerConfig as attributes.
        others: Facts that the config lacks, or that replace its own.
        words: How the user writes settings.
    """
    dtype = getattr(config, "params_dtype", None)
    facts = {
        "captures": True,
        "element_bytes": None if dtype is None else dtype.itemsize,
        "fp8_recipe": fp8_recipe(config),
        "moe_flex_dispatcher_backend": getattr(config, "moe_flex_dispatcher_backend", None)
        or "deepep",
        "moe_token_dispatcher_type": getattr(config, "moe_token_dispatcher_type", None)
        or "allgather",
        "swiglu": getattr(config, "gated_linear_unit", None),
        **(others or {}),
    }
    return Facts(lambda name: facts[name] if name in facts else getattr(config, name, None), words)
