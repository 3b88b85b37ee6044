"""Packed sequences in a model with experts: the rows behind the documents go to none of them."""

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
    """Let routers choose among the rows that hold a token, as if there were no other row.

    ``attach(packing=...)`` does it by itself, for its eager steps too. Call it where a model is to
    be trained on the same padded rows without chunk graphs; before `attach`, if both are wanted.
    From then on the model takes ``padding_mask``, bool [1, rows], True where a row holds no token,
    on every pipeline stage. A padding row goes to no expert, is in no loss or count of a router,
    and experts drop tokens by the capacity that the tokens alone would give them.

    Args:
        model_chunks: what is given to the schedule as ``model``.
        config: Megatron's TransformerConfig.

    Returns:
        A function that ends it.

    Raises:
        ConfigError: a setting, or this release of Megatron, cannot do it.
    """
    return padded_routing(model_chunks, config).install()


def padded_routing(model_chunks: nn.Module | Sequence[nn.Module], config: Any) -> PaddedRouting:
    """What `keep_padding_from_experts` installs."""
    check(
        PADDED_ROWS_RULES,
        facts_of_model(config, {"pads_rows": True}),
        "Experts with these settings cannot be trained on packed sequences:",
    )
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else model_chunks
    return PaddedRouting([m for chunk in chunks for m in chunk.modules()])
