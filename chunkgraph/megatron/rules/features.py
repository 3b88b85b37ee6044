"""The rules of features that need few of them, from a file, a program or a command line."""

from __future__ import annotations

from chunkgraph.schedules import FILE_SUFFIX, Placement, get_family, list_schedules
from chunkgraph.settings.rule import Facts, Rule, recomputes

__all__ = [
    "FILE_ONLY_RULES",
    "FP8_RULES",
    "RECOMPUTE_RULES",
    "SCHEDULE_RULES",
    "SLOT_RULES",
    "STASH_RULES",
]


def _is_named(f: Facts) -> bool:
    name = f.schedule
    return name not in (None, "auto") and not name.endswith(FILE_SUFFIX)


def _is_unknown(f: Facts) -> object:
    known = list_schedules()
    return _is_named(f) and f.schedule not in known and {"known": ", ".join(known)}


def _is_in_v(f: Facts) -> bool:
    known = _is_named(f) and f.schedule in list_schedules()
    return known and get_family(f.schedule).placement is not Placement.LOOP


SCHEDULE_RULES = (
    Rule(
        "schedule: there is no such schedule; use auto, a CSV file of actions, or one of {known}",
        _is_unknown,
    ),
    Rule(
        "schedule: it places stages in a V, but Megatron's pipelines are loops (rank r holds the "
        "stages r, r + size, ...); use zb-h1 or interleaved-zb",
        _is_in_v,
    ),
)
"""Rules of a schedule's name, from a file, a program or a command line."""
SLOT_RULES = (
    Rule(
        "schedule: it holds every microbatch of a step at once, and chunk graphs have slots for a "
        "fixed number; use 1f1b or zb-h1, or train without graphs",
        lambda f: (
            f.captures is not False  # None outside of a configuration file: graphs are on
            and _is_named(f)
            and f.schedule in list_schedules()
            and not get_family(f.schedule).is_bounded
        ),
    ),
)
"""Rules of a schedule that drives chunk graphs."""


def _recomputes_scales(f: Facts) -> bool:
    parts = set(f.recompute_modules or ()) - {"core_attn"}
    how = f.recompute_granularity
    return bool(f.fp8_recipe) and (how == "full" or (how == "selective" and bool(parts)))


FP8_RULES = (
    Rule(
        "recompute_granularity fp8: Transformer Engine's recomputation keeps the scales of the "
        "first pass in a Python queue, which a replay does not advance; recompute only core_attn "
        "({recompute_granularity=selective}), or nothing",
        _recomputes_scales,
    ),
)
"""Rules of a model in FP8."""
RECOMPUTE_RULES = (
    Rule(
        "recompute_granularity hidden_dropout attention_dropout: a replay cannot repeat the "
        "dropout masks of what is recomputed; set the dropout to 0, or recompute parts of a layer "
        "without dropout",
        lambda f: (
            (f.hidden_dropout and f.recompute_granularity == "full")
            or (f.attention_dropout and recomputes(f, "core_attn"))
        ),
    ),
)
"""Rules of a model whose activations are recomputed."""


_UNTRIED = "fused kernels are not supported with marked padding"
STASH_RULES = (
    Rule(
        "stash num_moe_experts: only experts stash; leave it out",
        lambda f: f.stash and not f.num_moe_experts,
    ),
    Rule(
        "stash recompute_granularity recompute_modules: the activations of experts are recomputed "
        "instead of saved; use one of them",
        lambda f: f.stash and recomputes(f, "moe", "moe_act"),
    ),
    Rule("stash fp8: quantized tensors are not stashed; use one of them"),
    Rule(f"stash moe_permute_fusion: {_UNTRIED}; use one of them"),
    Rule(f"stash moe_router_fusion: {_UNTRIED}; use one of them"),
)
"""Rules of saved activations of experts in pages."""


FILE_ONLY_RULES = (
    Rule(
        "recompute_granularity recompute_modules: selective recomputation would recompute "
        "nothing; name parts of a layer, such as core_attn",
        lambda f: f.recompute_granularity == "selective" and not f.recompute_modules,
    ),
    Rule(
        "recompute_modules swiglu: without SwiGLU the feed-forward layer has a bias, which "
        "Megatron-core returns from the recomputed part, so that its backward recurses forever; "
        "use {swiglu=true}, or leave mlp out",
        lambda f: (
            f.recompute_granularity == "selective" and "mlp" in f.recompute_modules and not f.swiglu
        ),
    ),
    Rule(
        "fp8: only Transformer Engine's layers on a GPU support FP8; use {device=cuda} and "
        "{layer_spec=transformer_engine}, or leave it out",
        lambda f: f.fp8 and (f.layer_spec == "local" or f.device == "cpu"),
    ),
    Rule(
        "moe_layer_freq hybrid_layer_pattern: the pattern decides which layers have experts; leave "
        "the former out"
    ),
)
"""Rules of a configuration file."""
