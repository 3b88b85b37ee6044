"""Packed sequences in a model with experts: padding rows go to no expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from chunkgraph.megatron.features.experts.padding import PaddedRouting
from chunkgraph.megatron.features.experts.refusals import PADDED_ROWS_RULES
from chunkgraph.megatron.refusals import facts_of_model
from chunkgraph.settings.rule import check

__all__ = ["keep_padding_from_experts", "padded_routing"]


def keep_padding_from_experts(
    model_chunks: nn.Module | Sequence[nn.Module], config: Any
) -> Callable[[], None]:
    """Make routers ignore padding rows, as if there were only rows with tokens.

    ``attach(packing=...)`` does this itself, for its eager steps too. Call this function to train a
    model on the same padded rows without chunk graphs; to use both, call it before `attach`. The
    model then takes ``padding_mask``, bool, shape [1, rows], True for rows without a token, on
    every pipeline stage. A padding row goes to no expert and counts in no loss or count of a
    router, and the capacity of experts depends on the tokens alone.

    Args:
        model_chunks: The schedule's argument ``model``.
        config: Megatron's TransformerConfig.

    Returns:
        A function that undoes the change.

    Raises:
        ConfigError: A setting or this release of Megatron does not support it.
    """
    return padded_routing(model_chunks, config).install()


def padded_routing(model_chunks: nn.Module | Sequence[nn.Module], config: Any) -> PaddedRouting:
    """Return the object that `keep_padding_from_experts` installs."""
    check(
        PADDED_ROWS_RULES,
        facts_of_model(config, {"pads_rows": True}),
        "Experts with these settings cannot be trained on packed sequences:",
    )
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else model_chunks
    return PaddedRouting([m for chunk in chunks for m in chunk.modules()])
