"""The section ``stash``: saved activations of experts in pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from chunkgraph.errors import ConfigError

if TYPE_CHECKING:
    from chunkgraph.settings.config import Config

__all__ = ["StashConfig", "check_stash", "wrong_stash_value"]


@dataclass(frozen=True, kw_only=True)
class StashConfig:
    """What experts save for the backward goes to pages, only the rows that hold a token."""

    enabled: bool = False
    """Whether graphs of chunks with experts stash."""
    page_bytes: int = 65536
    """Bytes of a page, a multiple of 16 and no smaller than a row; some 16 rows waste little."""
    headroom: float = 1.1
    """Pages taken, as a multiple of what the eager steps before the capture showed to be needed."""
    initial_bytes: int | None = None
    """Bytes of the pages at first; null: as the eager steps show."""
    max_bytes: int | None = None
    """The most that they may grow to; null: no limit."""
    spill_bytes: int = 0
    """Bytes of pages in the host's memory, for what finds no page on the device."""
    on_overflow: Literal["rerun", "raise"] = "rerun"
    """What follows a step in which pages ran out: run it anew eagerly, or an error. The optimizer
    never sees its gradients."""
    max_recaptures: int = 2
    """How many times after such a step more pages are taken and graphs captured anew; after that
    such steps only run eagerly. Also for tokens without room, with token_drops=rerun."""
    prefetches: bool = False
    """Whether a backward reloads a layer's rows on a stream beside, while the layer after it runs;
    takes the memory of one layer more."""
    skips_single_slots: bool = False
    """Whether chunks with one slot, each of whose backwards follows its forward at once, keep what
    their experts save where it is: no way through the pages, for the memory of all rows once."""


def wrong_stash_value(stash: StashConfig) -> tuple[str, str] | None:
    """The first field whose value is out of range and what it must be, or None."""
    if stash.page_bytes < 16 or stash.page_bytes % 16:
        return "page_bytes", "it must be a multiple of 16"
    if not (stash.headroom > 0 and math.isfinite(stash.headroom)):
        return "headroom", "it must be greater than 0"
    for field in ("initial_bytes", "max_bytes", "spill_bytes", "max_recaptures"):
        value = getattr(stash, field)
        if value is not None and value < 0:
            return field, "it must be 0 or greater"
    return None


def check_stash(config: Config) -> None:
    """Check the section ``stash``.

    Raises:
        ConfigError: A value is out of range, or two settings cannot go together.
    """
    stash = config.stash
    if (wrong := wrong_stash_value(stash)) is not None:
        field, what = wrong
        raise ConfigError(f"stash.{field} is {getattr(stash, field)}; {what}.")
    if not stash.enabled:
        return
    if config.moe.num_moe_experts is None:
        raise ConfigError(
            "stash.enabled is true, but moe.num_moe_experts is null: only experts stash. "
            "Set one of them."
        )
    if stash.skips_single_slots:
        _check_skipping(config)
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


def _check_skipping(config: Config) -> None:
    name = "stash.skips_single_slots is true"
    if config.capture.shared_slots:
        raise ConfigError(
            f"{name} with capture.shared_slots: no chunk has a slot of its own. Set one to false."
        )
    if config.pipeline.pipeline_model_parallel_size == 1:
        raise ConfigError(
            f"{name} without a pipeline, where every backward follows its forward at once: nothing "
            "would be stashed. Set stash.enabled to false."
        )
