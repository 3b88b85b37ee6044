"""The rules of features that need few of them, from a file, a program or a command line."""

from __future__ import annotations

from chunkgraph.settings.rule import Facts, Rule, recomputes

__all__ = ["FP8_RULES", "RECOMPUTE_RULES", "STASH_RULES", "row_bytes"]


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


def row_bytes(f: Facts) -> int:
    """Return the bytes of the widest row that experts save: their input, or their hidden row."""
    hidden = f.moe_ffn_hidden_size or f.ffn_hidden_size or 0
    hidden //= f.expert_tensor_parallel_size or 1
    widest = max(hidden * (2 if f.swiglu else 1), f.moe_latent_size or f.hidden_size or 0)
    return int(widest * (f.element_bytes or 1))


def _has_small_pages(f: Facts) -> object:
    size = row_bytes(f)
    is_small = f.stash and f.num_moe_experts and f.page_bytes and size > f.page_bytes
    return is_small and {"size": size, "enough": 16 * -(-size // 16)}


_UNTRIED = "fused kernels are not supported with marked padding"
STASH_RULES = (
    Rule(
        "stash num_moe_experts: only experts stash; leave it out",
        lambda f: f.stash and not f.num_moe_experts,
    ),
    Rule(
        "stash page_bytes: experts save rows of {size} bytes, and a page must hold one; make it "
        "{enough} or more (16 rows waste little)",
        _has_small_pages,
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
