"""The rules of dispatch through HybridEP (``moe.moe_token_dispatcher_type: flex``)."""

from __future__ import annotations

from collections.abc import Callable

from chunkgraph.settings.rule import Facts, Rule, recomputes

__all__ = ["ALL_TO_ALL", "HYBRID_EP_RULES", "STATIC"]

ALL_TO_ALL = "use {moe_token_dispatcher_type=alltoall}"
"""The remedy that needs no extra package, for dropless experts and a fixed capacity."""
STATIC = (
    f"{ALL_TO_ALL}, {{moe_expert_capacity_factor=}} and {{moe_pad_expert_input_to_capacity=true}}"
)
"""The remedy where the grouped GEMM of dropless experts cannot be used."""
_UNTRIED = "the two are not supported together; leave one out, or "


def _uses_flex(f: Facts) -> bool:
    return bool(f.num_moe_experts) and f.moe_token_dispatcher_type == "flex"


def _with_flex(text: str, when: Callable[[Facts], object]) -> Rule:
    """Return a rule of HybridEP."""
    settings, _, why = text.partition(": ")
    return Rule(
        f"{settings} moe_flex_dispatcher_backend: {why}",
        lambda f: _uses_flex(f) and f.moe_flex_dispatcher_backend == "hybridep" and when(f),
    )


def _is_idle(name: str) -> Callable[[Facts], object]:
    return lambda f: (
        f.num_moe_experts and not _uses_flex(f) and getattr(f, name) not in (None, False)
    )


def _untried(setting: str, when: Callable[[Facts], object]) -> Rule:
    return _with_flex(f"{setting}: {_UNTRIED}{ALL_TO_ALL}", when)


HYBRID_EP_RULES = (
    Rule(
        "moe_token_dispatcher_type moe_flex_dispatcher_backend: only HybridEP can dispatch in a "
        f"graph; use {{moe_flex_dispatcher_backend=hybridep}}, or {ALL_TO_ALL}",
        lambda f: _uses_flex(f) and f.moe_flex_dispatcher_backend != "hybridep",
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
        "own parameters, which is supported for experts that take all tokens; leave one of them "
        "out",
        lambda f: (
            _is_idle("use_transformer_engine_op_fuser")(f)
            and f.moe_expert_capacity_factor is not None
            and f.moe_expert_capacity_factor >= 0
        ),
    ),
    _with_flex(
        "moe_expert_capacity_factor: experts of a rank share its room; leave it and "
        "{moe_pad_expert_input_to_capacity=} out; {moe_expert_rank_capacity_factor=} sets the room",
        lambda f: (
            (f.moe_expert_capacity_factor is not None and f.moe_expert_capacity_factor >= 0)
            or f.moe_pad_expert_input_to_capacity
        ),
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
        lambda f: f.captures and f.splits_backward,
    ),
    _with_flex(
        "expert_tensor_parallel_size: the grouped GEMM cannot be split; make it 1",
        lambda f: (f.expert_tensor_parallel_size or 1) > 1,
    ),
    _untried("recompute_granularity", lambda f: recomputes(f, "moe", "moe_act")),
    _untried("moe_shared_expert_overlap", lambda f: f.moe_shared_expert_overlap),
    _untried("moe_permute_fusion_into_hybridep", lambda f: f.moe_permute_fusion_into_hybridep),
    _untried("moe_latent_size", lambda f: f.moe_latent_size),
)
