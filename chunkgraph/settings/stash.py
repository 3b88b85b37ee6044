"""The section ``stash`` and its rules: saved activations of experts in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from chunkgraph.errors import ConfigError
from chunkgraph.settings.setting import NOT_NEGATIVE, POSITIVE, Bounds, setting

if TYPE_CHECKING:
    from chunkgraph.settings.config import Config

__all__ = ["StashConfig", "check_stash"]


_PAGE = Bounds(minimum=16, multiple_of=16)


@dataclass(frozen=True, kw_only=True)
class StashConfig:
    """Pages for the activations that experts save, only for rows that hold a token."""

    enabled: bool = setting(
        False,
        help="Store what experts save for the backward in pages, only rows that hold a token.",
        flag="--cuda-graph-stash",
    )
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
        help="Bytes of pages in host memory, for rows that find no page on the device.",
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
        help="How often to add pages and recapture after such a step; later ones only run eagerly. "
        "Also applies to moe.token_drops=rerun.",
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


def check_stash(config: Config) -> None:
    """Check the section ``stash``.

    Raises:
        ConfigError: A value is out of range, or two settings cannot go together.
    """
    stash = config.stash
    if not stash.enabled:
        return
    if config.moe.num_moe_experts is None:
        raise ConfigError(
            "stash.enabled is true, but moe.num_moe_experts is null: only experts stash. "
            "Set one of them."
        )
    model = config.model
    recomputes_experts = model.recompute_granularity == "full" or (
        model.recompute_granularity == "selective"
        and bool({"moe", "moe_act"} & set(model.recompute_modules))
    )
    if recomputes_experts:
        raise ConfigError(
            "stash.enabled is true, but what experts save is recomputed already "
            f"(model.recompute_granularity={model.recompute_granularity}). Use one of them."
        )
    if model.fp8 is not None:
        raise ConfigError(
            f"stash.enabled is true with model.fp8={model.fp8}: quantized tensors are not stashed. "
            "Use one of them."
        )
