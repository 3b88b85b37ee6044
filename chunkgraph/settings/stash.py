"""The section ``stash`` and its rules: saved activations of experts in pages."""

from __future__ import annotations

from dataclasses import dataclass

from chunkgraph.settings.rule import Rule, recomputes
from chunkgraph.settings.setting import NOT_NEGATIVE, check_bounds, setting

__all__ = ["STASH_RULES", "StashConfig"]


@dataclass(frozen=True, kw_only=True)
class StashConfig:
    """Pages for the activations that experts save, only for rows that hold a token.

    Raises:
        ConfigError: a value is out of range.
    """

    enabled: bool = setting(
        False,
        help="Store activations that experts save in pages, only for rows that hold a token.",
        flag="--cuda-graph-stash",
    )
    initial_bytes: int | None = setting(
        None,
        help="Bytes of pages to begin with. Null: 1.1 times what the eager steps before the "
        "capture used.",
        bounds=NOT_NEGATIVE,
        flag="--cuda-graph-stash-initial-bytes",
        needs="stash.enabled",
    )
    max_bytes: int | None = setting(
        None,
        help="Bytes that the pages may grow to. Null: no limit.",
        bounds=NOT_NEGATIVE,
        flag="--cuda-graph-stash-max-bytes",
        needs="stash.enabled",
    )

    def __post_init__(self) -> None:
        check_bounds(self, "stash.")


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
