"""The section ``stash`` and its rules: saved activations of experts in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chunkgraph.settings.rule import Facts, Rule, recomputes
from chunkgraph.settings.setting import NOT_NEGATIVE, POSITIVE, Bounds, check_bounds, setting

__all__ = ["STASH_RULES", "StashConfig", "StashSettings"]

_PAGE = Bounds(minimum=16, multiple_of=16)


@dataclass(frozen=True, kw_only=True)
class _Switch:
    enabled: bool = setting(
        False,
        help="Store activations that experts save in pages, only for rows that hold a token.",
        flag="--cuda-graph-stash",
    )


@dataclass(frozen=True, kw_only=True)
class StashSettings:
    """The size of a stash, and the reaction when it runs out.

    Raises:
        ConfigError: a value is out of range.
    """

    page_bytes: int = setting(
        65536,
        help="Bytes per page, a multiple of 16 and no smaller than a row. About 16 rows per page "
        "waste little.",
        bounds=_PAGE,
        flag="--cuda-graph-stash-page-bytes",
        needs="stash.enabled",
    )
    headroom: float = setting(
        1.1,
        help="Pages to allocate, as a multiple of what the eager steps before the capture used.",
        bounds=POSITIVE,
        flag="--cuda-graph-stash-headroom",
        needs="stash.enabled",
    )
    initial_bytes: int | None = setting(
        None,
        help="Bytes of pages to begin with. Null: derived from the eager steps.",
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
    spill_bytes: int = setting(
        0,
        help="Bytes of pages in host memory, for rows that do not fit on the device.",
        bounds=NOT_NEGATIVE,
        flag="--cuda-graph-stash-spill-bytes",
        needs="stash.enabled",
    )
    on_overflow: Literal["rerun", "raise"] = setting(
        "rerun",
        help="After a step that ran out of pages: rerun it eagerly, or raise an error. The "
        "optimizer never sees the gradients of the failed step.",
        flag="--cuda-graph-stash-on-overflow",
        needs="stash.enabled",
    )
    max_recaptures: int = setting(
        2,
        help="How often to add pages and recapture after such a step; later ones only run eagerly.",
        bounds=NOT_NEGATIVE,
        flag="--cuda-graph-stash-max-recaptures",
        needs="stash.enabled",
    )
    prefetches: bool = setting(
        False,
        help="Reload a layer's rows on a second stream while the backward of the next layer runs. "
        "Takes the memory of one more layer.",
        flag="--cuda-graph-stash-prefetches",
        needs="stash.enabled",
    )

    def __post_init__(self) -> None:
        check_bounds(self, "stash.", StashSettings)


@dataclass(frozen=True, kw_only=True)
class StashConfig(StashSettings, _Switch):
    """Pages for the activations that experts save, only for rows that hold a token."""


def _row_bytes(f: Facts) -> int:
    """Return the bytes of the widest row that experts save: their input, or their hidden row."""
    hidden = f.moe_ffn_hidden_size or f.ffn_hidden_size or 0
    hidden //= f.expert_tensor_parallel_size or 1
    widest = max(hidden * (2 if f.swiglu else 1), f.moe_latent_size or f.hidden_size or 0)
    return int(widest * (f.element_bytes or 1))


def _has_small_pages(f: Facts) -> object:
    size = _row_bytes(f)
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
