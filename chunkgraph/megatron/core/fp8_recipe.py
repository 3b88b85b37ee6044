"""Read the FP8 recipe of a Megatron configuration, without importing Transformer Engine."""

from __future__ import annotations

from typing import Any

__all__ = ["fp8_recipe"]


def fp8_recipe(config: Any) -> str | None:
    """Return the FP8 recipe of ``config`` (``delayed``, ``tensorwise``, ...); None without FP8."""
    if not getattr(config, "fp8", None):
        return None
    recipe = getattr(config, "fp8_recipe", None) or "delayed"
    return str(getattr(recipe, "value", recipe))
