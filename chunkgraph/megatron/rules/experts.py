"""The rules of a model with experts.

A graph needs shapes that are known before the tokens: a fixed, padded capacity of every expert with
a dispatcher that then reads nothing from the device, or limited rows of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunkgraph.errors import TopologyError
from chunkgraph.settings.rule import Facts, Rule, recomputes

ALL_TO_ALL = "use {moe_token_dispatcher_type=alltoall}"
"""The remedy that needs no extra package, for dropless experts and a fixed capacity."""
STATIC = (
    f"{ALL_TO_ALL}, {{moe_expert_capacity_factor=}} and {{moe_pad_expert_input_to_capacity=true}}"
)
"""The remedy where the grouped GEMM of dropless experts cannot be used."""
_UNTRIED = "the two are not supported together; leave one out, or "


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


def balances_by(kind: str, model: Any) -> bool:
    """Return whether ``model`` (see `uses_dropless`) balances the loads of experts by ``kind``."""
    kinds = getattr(model, "moe_router_load_balancing_type", None)
    return kind in (kinds if isinstance(kinds, (list, tuple)) else [kinds])


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


def _uses_flex(f: Facts) -> bool:
    return bool(f.num_moe_experts) and f.moe_token_dispatcher_type == "flex"


def _quantizes_through_flex(f: Facts) -> bool:
    return bool(_captures_dropless(f) and f.fp8 and _uses_flex(f))


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


def _rule(text: str, when: Callable[[Facts], object] | None = None) -> Rule:
    """Return a rule for models with experts; by default it applies if the first setting is on."""
    name = text.split(maxsplit=1)[0].removesuffix(":")
    is_on = when or (lambda f: getattr(f, name))
    return Rule(text, lambda f: f.num_moe_experts and is_on(f))


_HYBRID_EP_RULES = (
    Rule(
        "moe_token_dispatcher_type moe_flex_dispatcher_backend: only HybridEP can dispatch in a "
        f"graph; use {{moe_flex_dispatcher_backend=hybridep}}, or {ALL_TO_ALL}",
        lambda f: (
            _uses_flex(f)
            and f.moe_flex_dispatcher_backend != "hybridep"
            and not _quantizes_through_flex(f)  # then no backend helps
        ),
    ),
    Rule(
        "moe_expert_rank_capacity_factor moe_token_dispatcher_type: it belongs to "
        "{moe_token_dispatcher_type=flex}; change one of them",
        _is_idle("moe_expert_rank_capacity_factor"),
    ),
    Rule(
        "use_transformer_engine_op_fuser moe_expert_capacity_factor: fused operations hold their "
        "own parameters, which is supported for experts that take all tokens; leave one of them "
        "out",
        lambda f: _is_idle("use_transformer_engine_op_fuser")(f) and not uses_dropless(f),
    ),
    _with_flex(
        "moe_expert_capacity_factor: experts of a rank share its room; leave it and "
        "{moe_pad_expert_input_to_capacity=} out; {moe_expert_rank_capacity_factor=} sets the room",
        lambda f: not uses_dropless(f) or f.moe_pad_expert_input_to_capacity,
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
"""Rules of dispatch through HybridEP (``moe_token_dispatcher_type: flex``)."""

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
        "fp8 moe_token_dispatcher_type moe_expert_capacity_factor: DeepEP pads quantized rows to "
        f"counts on the host; use {{moe_token_dispatcher_type=alltoall}}, or {STATIC}",
        _quantizes_through_flex,
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
        # `Room` has room for all with a billionth less.
        _with_capacity(
            lambda f: f.moe_expert_capacity_factor < 0.999999 and f.token_drops != "count"
        ),
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
    *_HYBRID_EP_RULES,
)
"""Rules that a file, a program and a command line share."""

MOE_RULES = (
    _rule("moe_use_legacy_grouped_gemm: its kernels read the token counts on the host"),
    _rule("moe_router_padding_for_quantization: it changes how many rows an expert gets"),
    _rule("moe_enable_routing_replay: it replays Python state"),
    _rule(
        "moe_router_force_biased: it keeps random numbers drawn in the first forward",
        lambda f: f.moe_router_force_biased is not None,
    ),
    _rule(
        "recompute_granularity moe_input_jitter_eps moe_router_force_load_balancing: a replay "
        "cannot repeat the random numbers of routers that are recomputed; leave the draws out, or "
        "recompute no experts",
        lambda f: (
            recomputes(f, "moe") and (f.moe_input_jitter_eps or f.moe_router_force_load_balancing)
        ),
    ),
    _rule(
        "moe_paged_stash: the order of its pages is Python state, frozen in a replay; {stash=} has "
        "the same purpose"
    ),
    _rule(
        "moe_permute_fusion moe_token_dispatcher_type: it reads the token counts on the host; "
        "turn the fusion off, or use {moe_token_dispatcher_type=alltoall}",
        lambda f: (
            f.moe_permute_fusion
            and f.moe_token_dispatcher_type == "allgather"
            and not uses_dropless(f)
        ),
    ),
    _rule(
        "moe_router_load_balancing_type: sinkhorn iterates until a value that it reads on the "
        "host is small; a graph has a fixed number of rounds, and only steps of experts that take "
        "all tokens run again if it is too small; leave out the capacity and the flexible "
        "dispatcher",
        lambda f: balances_by("sinkhorn", f) and not uses_dropless(f),
    ),
    *EXPERT_RULES,
)
"""Rules of a model, with those of Megatron's settings that no file has."""


def _padded(text: str, when: Callable[[Facts], object] | None = None) -> Rule:
    """Return a rule for models with experts whose rows may contain no token."""
    setting, _, why = text.partition(": ")
    is_on = when or (lambda f: getattr(f, setting))
    return _rule(f"{setting} packed: {why}", lambda f: f.pads_rows and is_on(f))


PADDED_ROWS_RULES = (
    _padded("moe_router_fusion: its kernel of the losses needs the number of tokens on the host"),
    _padded(
        "moe_permute_fusion: its kernel fills every expert's room from the map of tokens alone, "
        "which leaves out padding; turn the fusion off"
    ),
    _padded(
        "moe_router_load_balancing_type: sinkhorn and quantile_balancing do not support padding",
        lambda f: balances_by("sinkhorn", f) or balances_by("quantile_balancing", f),
    ),
)
"""Rules for packed sequences in rows that may contain no token."""
