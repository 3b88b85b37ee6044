"""The rules of dispatch through DeepEP (``moe_token_dispatcher_type: flex``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from chunkgraph.settings.rule import Facts, Rule, recomputes

__all__ = ["ALL_TO_ALL", "DEEPEP_RANKS", "DEEPEP_RULES", "STATIC", "measures_budget"]

DEEPEP_RANKS = (2, 4, 8)
"""Numbers of ranks of a node for which DeepEP has kernels that can be captured."""
ALL_TO_ALL = "use {moe_token_dispatcher_type=alltoall}"
"""The remedy that needs no extra package, for dropless experts and a fixed capacity."""
STATIC = f"{ALL_TO_ALL} and {{moe_expert_capacity_factor=}}"
"""The remedy where the grouped GEMM of dropless experts cannot be used."""
_BACKENDS = ("hybridep", "deepep")
_MOST_HIDDEN, _HIDDEN_MULTIPLE, _MOST_TOPK = 8176, 16, 32
_HYBRIDEP = "use {moe_flex_dispatcher_backend=hybridep}"
_UNTRIED = "the two are not supported together; leave one out, or "
_GROUPED = "of this dispatcher's experts, only this grouped GEMM reads token counts on the device"


def _uses_flex(f: Facts) -> bool:
    return bool(f.num_moe_experts) and f.moe_token_dispatcher_type == "flex"


def measures_budget(model: Any) -> bool:
    """Return whether the rows of a rank's experts get room by the loads of eager steps.

    Args:
        model: `Facts`, or a TransformerConfig.
    """
    return (
        getattr(model, "moe_token_dispatcher_type", None) == "flex"
        and getattr(model, "moe_flex_dispatcher_backend", None) == "hybridep"
        and getattr(model, "moe_expert_rank_capacity_factor", None) is None
    )


def _with_flex(text: str, when: Callable[[Facts], object], *backends: str) -> Rule:
    """Return a rule of the flex dispatcher with these backends; default: all of them."""
    settings, _, why = text.partition(": ")
    allowed = backends or _BACKENDS
    return Rule(
        f"{settings} moe_flex_dispatcher_backend: {why}",
        lambda f: _uses_flex(f) and f.moe_flex_dispatcher_backend in allowed and when(f),
    )


def _with_budget(text: str, when: Callable[[Facts], object]) -> Rule:
    """Return a rule of the flex dispatcher with the user's budget."""
    return _with_flex(text, lambda f: not measures_budget(f) and when(f))


def _is_off(name: str) -> Callable[[Facts], object]:
    return lambda f: not getattr(f, name)


def _is_idle(name: str) -> Callable[[Facts], object]:
    return lambda f: (
        f.num_moe_experts and not _uses_flex(f) and getattr(f, name) not in (None, False)
    )


def _unknown_backend(f: Facts) -> object:
    backend = f.moe_flex_dispatcher_backend
    if not _uses_flex(f) or backend in _BACKENDS:
        return False
    if backend == "ncclep":
        what = "a rank over its budget ends the process, so a step cannot run again"
    else:
        what = "no backend" if backend is None else "not known"
    return {"what": what}


def _has_no_budget(f: Facts) -> object:
    factor = f.moe_expert_rank_capacity_factor
    if (factor is not None and math.isfinite(factor)) or measures_budget(f):
        return False
    # Only a program gets this far: Megatron's config refuses the setting for this backend.
    is_late = f.is_attached and f.moe_flex_dispatcher_backend == "deepep"
    how = (
        " (set it on Megatron's config after creating it and before attach(), since the config's "
        "own check refuses it for this backend)"
    )
    return {"how": how if is_late else ""}


def _is_below_1(f: Facts) -> bool:
    factor = f.moe_expert_rank_capacity_factor
    return bool(factor is not None and factor < 1)


def _has_capacity(f: Facts) -> bool:
    capacity = f.moe_expert_capacity_factor
    return (capacity is not None and capacity >= 0) or bool(f.moe_pad_expert_input_to_capacity)


def _untried(setting: str, when: Callable[[Facts], object]) -> Rule:
    return _with_flex(f"{setting}: {_UNTRIED}{ALL_TO_ALL}", when)


DEEPEP_RULES = (
    Rule(
        "moe_token_dispatcher_type moe_flex_dispatcher_backend: {what}; only DeepEP can dispatch "
        f"in a graph; {_HYBRIDEP}, or {{moe_flex_dispatcher_backend=deepep}} within a node, each "
        f"with {{moe_expert_rank_capacity_factor=}}; or {ALL_TO_ALL}",
        _unknown_backend,
    ),
    *(
        Rule(
            f"{setting} moe_token_dispatcher_type: it belongs to "
            "{moe_token_dispatcher_type=flex}; change one of them",
            _is_idle(setting),
        )
        for setting in ("moe_flex_dispatcher_backend", "moe_expert_rank_capacity_factor")
    ),
    Rule(
        "use_transformer_engine_op_fuser moe_expert_capacity_factor: fused operations hold their "
        "own parameters, which is supported for experts that take all tokens and with "
        "{moe_token_dispatcher_type=flex}; leave one of them out",
        lambda f: (
            _is_idle("use_transformer_engine_op_fuser")(f)
            and f.moe_expert_capacity_factor is not None
            and f.moe_expert_capacity_factor >= 0
        ),
    ),
    _with_flex(
        "expert_model_parallel_size: it dispatches in a graph between "
        f"{', '.join(map(str, DEEPEP_RANKS))} ranks of a node; choose one of these, or {_HYBRIDEP}",
        lambda f: (f.expert_model_parallel_size or 1) not in DEEPEP_RANKS,
        "deepep",
    ),
    # DeepEP 1.2.1 asserts this on the device (``intranode.cu``).
    _with_flex(
        f"hidden_size: its kernels take up to {_MOST_HIDDEN}, a multiple of {_HIDDEN_MULTIPLE}; "
        f"{_HYBRIDEP}",
        lambda f: (f.hidden_size or 0) > _MOST_HIDDEN or (f.hidden_size or 0) % _HIDDEN_MULTIPLE,
        "deepep",
    ),
    _with_flex(
        f"moe_router_topk: its kernels take up to {_MOST_TOPK}; {_HYBRIDEP}",
        lambda f: (f.moe_router_topk or 0) > _MOST_TOPK,
        "deepep",
    ),
    _with_flex("fp16: it adds only bfloat16; use {bf16=true}", lambda f: f.fp16, "deepep"),
    _with_flex(
        "moe_expert_rank_capacity_factor: the number of rows that this dispatcher gives a rank "
        "depends on the tokens, but a graph has fixed shapes; make it 1 or more{how}, enough for "
        f"the highest load; or {ALL_TO_ALL}",
        _has_no_budget,
    ),
    _with_flex(
        "moe_expert_rank_capacity_factor: below 1, ranks drop tokens in every step; make it 1 or "
        "more",
        _is_below_1,
    ),
    _with_flex(
        "moe_expert_capacity_factor: experts of a rank share its room; leave it and "
        "{moe_pad_expert_input_to_capacity=} out; {moe_expert_rank_capacity_factor=} sets the room",
        _has_capacity,
    ),
    _with_budget(
        "token_drops: it reports only that a rank had no room; use {token_drops=rerun}, "
        "which runs such a step again, or {token_drops=raise}",
        lambda f: f.token_drops not in ("raise", "rerun"),
    ),
    *(
        _with_budget(f"{name}: {_GROUPED}; turn it on, or {ALL_TO_ALL}", _is_off(name))
        for name in ("use_transformer_engine_op_fuser", "moe_grouped_gemm", "swiglu")
    ),
    _with_flex(
        "moe_router_dtype: it sends probabilities in float32; use {moe_router_dtype=fp32}",
        lambda f: f.moe_router_dtype != "fp32",
    ),
    _with_flex("bf16: it sends rows of 2 bytes; use {bf16=true}", lambda f: not (f.bf16 or f.fp16)),
    _with_flex(
        "num_warmup_steps: its first eager step creates its buffer and compiles kernels; make it 1 "
        "or more",
        lambda f: f.captures and f.num_warmup_steps is not None and f.num_warmup_steps < 1,
    ),
    _with_flex(
        "schedule: its kernels would read weight gradients that are not computed yet; use a "
        "schedule that does not split backwards, or {moe_token_dispatcher_type=alltoall}",
        lambda f: f.captures and f.splits_backward and measures_budget(f),
    ),
    _with_flex(
        "expert_tensor_parallel_size: the grouped GEMM cannot be split; make it 1",
        lambda f: (f.expert_tensor_parallel_size or 1) > 1,
    ),
    _with_budget(f"fp8: {_UNTRIED}{STATIC}", lambda f: f.fp8),
    _with_budget(f"fp4: {_UNTRIED}{STATIC}", lambda f: f.fp4),
    _untried("recompute_granularity", lambda f: recomputes(f, "moe", "moe_act")),
    _untried("moe_shared_expert_overlap", lambda f: f.moe_shared_expert_overlap),
    _untried("moe_permute_fusion_into_hybridep", lambda f: f.moe_permute_fusion_into_hybridep),
    _untried("moe_latent_size", lambda f: f.moe_latent_size),
)
