"""Which mixture-of-experts settings a chunk graph can hold, and what is said of the others.

A graph needs shapes that are known before the tokens are: a fixed capacity of every expert, filled
up with padding, and a dispatcher that then asks the device for nothing; or DeepEP with a fixed
budget of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chunkgraph.megatron.features.experts.deep_ep import flex_refusals
from chunkgraph.megatron.features.experts.dropless import uses_dropless
from chunkgraph.megatron.features.experts.sinkhorn import uses_sinkhorn

__all__ = ["idle_settings", "moe_refusals", "packed_moe_refusals", "stash_refusals"]

_STATIC_DISPATCHERS = ("alltoall", "allgather")
_STATIC = (
    "set moe_token_dispatcher_type='alltoall', moe_expert_capacity_factor and "
    "moe_pad_expert_input_to_capacity=True"
)


@dataclass(frozen=True)
class _Refusal:
    field: str
    why: str
    wanted: Callable[[Any], bool] = bool


_REFUSALS = (
    _Refusal("moe_shared_expert_overlap", "it keeps activations in Python between its parts"),
    _Refusal("moe_use_legacy_grouped_gemm", "its kernels read the token counts on the host"),
    _Refusal("moe_router_padding_for_quantization", "it changes how many rows an expert gets"),
    _Refusal("moe_router_padding_for_fp8", "it changes how many rows an expert gets"),
    _Refusal("moe_enable_routing_replay", "what it replays is Python state"),
    _Refusal(
        "moe_router_force_biased",
        "it keeps random numbers drawn in the first forward",
        lambda v: v is not None,
    ),
    _Refusal("moe_paged_stash", "it stashes for dispatch without a fixed capacity only"),
    _Refusal("moe_enable_deepep", f"the number of rows depends on the tokens; {_STATIC}"),
)

_PACKED_REFUSALS = (
    _Refusal(
        "moe_router_fusion", "its kernel of the losses wants the number of tokens on the host"
    ),
    _Refusal(
        "moe_permute_fusion",
        "its kernel fills every expert's room from the map of tokens alone, which leaves out "
        "padding; turn the fusion off",
    ),
)


def moe_refusals(config: Any, token_drops: str = "warn") -> list[str]:
    """What keeps the experts of a model out of a graph, each with what to do.

    Args:
        config: anything that has TransformerConfig's fields as attributes, or some of them.
        token_drops: see `attach`.
    """
    num_experts = getattr(config, "num_moe_experts", None)
    if not num_experts:
        return []
    found = [
        f"{refusal.field}={getattr(config, refusal.field)!r}: {refusal.why}"
        for refusal in _REFUSALS
        if refusal.wanted(getattr(config, refusal.field, None))
    ]
    if getattr(config, "moe_token_dispatcher_type", None) == "flex":
        found += flex_refusals(config, token_drops)
    elif uses_dropless(config):
        found += _dropless_refusals(config)
    else:
        found += _dispatch_refusals(config)
        found += _capacity_refusals(config, num_experts, token_drops)
    found += _sharding_refusals(config, num_experts)
    if token_drops == "rerun" and getattr(config, "fp8", None):
        found.append(
            f"token_drops='rerun' with fp8={config.fp8!r}: a step that is run anew would update "
            "the scales a second time; use token_drops='raise', or train without FP8"
        )
    if uses_sinkhorn(config) and not uses_dropless(config):
        found.append(
            "moe_router_load_balancing_type='sinkhorn' with a capacity or the flexible dispatcher: "
            "it iterates until a value that it reads on the host is small, and a step whose rounds "
            "were too few runs again only with experts that take all tokens"
        )
    return found


def idle_settings(config: Any) -> list[str]:
    """What does nothing in Megatron itself with a fixed capacity, in a graph or not.

    Args:
        config: as for `moe_refusals`.
    """
    if not (
        getattr(config, "num_moe_experts", None)
        and getattr(config, "moe_router_enable_expert_bias", False)
        and getattr(config, "moe_pad_expert_input_to_capacity", False)
    ):
        return []
    why = (
        "moe_router_enable_expert_bias=True with moe_pad_expert_input_to_capacity=True: Megatron "
        "counts the rows of each expert after they were filled up, when all have as many, so that "
        "the bias stays what it is and balances nothing. Balance with moe_aux_loss_coeff"
    )
    return [why]


def stash_refusals(config: Any, page_bytes: int | None = None) -> list[str]:
    """What keeps the experts of a model from stashing what they save, each with what to do.

    Args:
        config: as for `moe_refusals`.
        page_bytes: of the stash; None leaves its size unchecked.
    """
    if not getattr(config, "num_moe_experts", None):
        return ["stash without num_moe_experts: only experts stash; leave it out"]
    found = []
    row_bytes = _widest_row_bytes(config)
    if page_bytes is not None and row_bytes > page_bytes:
        found.append(
            f"stash with page_bytes={page_bytes}: experts save rows of {row_bytes} bytes, which a "
            f"page must hold; make it {16 * -(-row_bytes // 16)} or more (64 rows waste little)"
        )
    how = getattr(config, "recompute_granularity", None)
    modules = set(getattr(config, "recompute_modules", None) or ())
    if how == "full" or (how == "selective" and {"moe", "moe_act"} & modules):
        found.append(
            f"stash with recompute_granularity={how!r}, recompute_modules={sorted(modules)}: what "
            "experts save is recomputed already; use one of them"
        )
    if getattr(config, "fp8", None):
        found.append(f"stash with fp8={config.fp8!r}: quantized tensors are not stashed")
    if getattr(config, "moe_permute_fusion", False):
        found.append(
            "stash with moe_permute_fusion=True: fused kernels were not tried with marked padding"
        )
    if getattr(config, "moe_router_fusion", False):
        found.append(
            "stash with moe_router_fusion=True: fused kernels were not tried with marked padding"
        )
    return found


def _widest_row_bytes(config: Any) -> int:
    """Of what experts save of a token: their input, or what is between their two products."""

    def size(*names: str) -> int:
        return next((v for n in names if (v := getattr(config, n, None))), 0)

    inside = size("moe_ffn_hidden_size", "ffn_hidden_size")
    inside //= size("expert_tensor_parallel_size") or 1
    inside *= 2 if getattr(config, "gated_linear_unit", False) else 1
    dtype = getattr(config, "params_dtype", None)
    unit = dtype.itemsize if dtype is not None else 1
    return int(max(inside, size("moe_latent_size", "hidden_size")) * unit)


def packed_moe_refusals(config: Any) -> list[str]:
    """What keeps experts from being trained on packed sequences, each with what to do.

    Args:
        config: anything that has TransformerConfig's fields as attributes, or some of them.
    """
    found = [
        f"{refusal.field}={getattr(config, refusal.field)!r}: {refusal.why}"
        for refusal in _PACKED_REFUSALS
        if refusal.wanted(getattr(config, refusal.field, None))
    ]
    if uses_sinkhorn(config):
        found.append("moe_router_load_balancing_type='sinkhorn': it knows nothing of padding")
    kinds = getattr(config, "moe_router_load_balancing_type", None)
    if "quantile_balancing" in (kinds if isinstance(kinds, (list, tuple)) else [kinds]):
        found.append(
            "moe_router_load_balancing_type='quantile_balancing': it knows nothing of padding"
        )
    return found


def _dispatch_refusals(config: Any) -> list[str]:
    if getattr(config, "use_transformer_engine_op_fuser", False):
        why = (
            "use_transformer_engine_op_fuser=True: its grouped MLP was not tried with a fixed "
            "capacity of each expert; it belongs to DeepEP's dispatch"
        )
        return [why]
    dispatcher = getattr(config, "moe_token_dispatcher_type", None) or "allgather"
    if dispatcher not in _STATIC_DISPATCHERS:
        return [f"moe_token_dispatcher_type={dispatcher!r}: not known; {_STATIC}"]
    if dispatcher == "allgather" and getattr(config, "moe_permute_fusion", False):
        why = (
            "moe_permute_fusion=True with moe_token_dispatcher_type='allgather': it reads the "
            "token counts on the host; turn the fusion off, or use 'alltoall'"
        )
        return [why]
    return []


def _dropless_refusals(config: Any) -> list[str]:
    """What keeps experts that take all tokens out of a graph."""
    found = []
    dispatcher = getattr(config, "moe_token_dispatcher_type", None) or "allgather"
    if dispatcher not in _STATIC_DISPATCHERS:
        found.append(f"moe_token_dispatcher_type={dispatcher!r}: not known; {_STATIC}")
    found += [
        f"{name}={value!r} without moe_expert_capacity_factor: the grouped products with sizes on "
        f"the device multiply bfloat16; train without {name.upper()}, or {_STATIC}"
        for name in ("fp8", "fp4")
        if (value := getattr(config, name, None))
    ]
    if getattr(config, "use_transformer_engine_op_fuser", False):
        found.append(
            "use_transformer_engine_op_fuser=True: its grouped MLP belongs to DeepEP's dispatch "
            "here; turn it off, or set moe_token_dispatcher_type='flex'"
        )
    return found


def _capacity_refusals(config: Any, num_experts: int, token_drops: str) -> list[str]:
    factor = getattr(config, "moe_expert_capacity_factor", None)
    top_k = getattr(config, "moe_router_topk", None) or 1
    enough = num_experts / top_k
    assert factor is not None  # else they take all tokens
    found = []
    if not getattr(config, "moe_pad_expert_input_to_capacity", False):
        found.append(
            "moe_pad_expert_input_to_capacity=False: experts would get as many rows as tokens "
            "chose them, and a graph has fixed shapes; set it to True"
        )
    if factor < 1 and token_drops != "count":
        found.append(
            f"moe_expert_capacity_factor={factor!r}: below 1 tokens are dropped in every step; "
            "raise it, or say token_drops='count' if that is meant"
        )
    if factor > enough:
        found.append(
            f"moe_expert_capacity_factor={factor!r}: above num_moe_experts / moe_router_topk "
            f"({enough:g}) an expert would have room for more tokens than there are, which "
            "Megatron's permutation cannot do; that number has room for all"
        )
    return found


def _sharding_refusals(config: Any, num_experts: int) -> list[str]:
    ranks = getattr(config, "expert_model_parallel_size", None) or 1
    if num_experts % ranks == 0:
        return []
    why = f"expert_model_parallel_size={ranks}: it does not divide num_moe_experts ({num_experts})"
    return [why]
