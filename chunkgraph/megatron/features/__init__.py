"""The features: support for capabilities of a model, one folder each."""

from __future__ import annotations

from chunkgraph.megatron.feature import Feature
from chunkgraph.megatron.features.contexts.feature import Contexts
from chunkgraph.megatron.features.experts.feature import Experts
from chunkgraph.megatron.features.fp8 import Fp8State
from chunkgraph.megatron.features.hybrid import Hybrid
from chunkgraph.megatron.features.model_state import ModelState
from chunkgraph.megatron.features.packing.feature import PackedCalls, Packing
from chunkgraph.megatron.features.packing.pinned import PinnedRows
from chunkgraph.megatron.features.sharded import Sharding
from chunkgraph.megatron.features.stash import ExpertStash
from chunkgraph.megatron.features.tracked_losses import TokenPrediction

__all__ = ["FEATURES"]

FEATURES: tuple[type[Feature], ...] = (
    ModelState,
    Sharding,
    Hybrid,
    PinnedRows,
    PackedCalls,
    Packing,
    Contexts,
    Experts,
    ExpertStash,
    Fp8State,
    TokenPrediction,
)
"""The features in order: the first one wraps the model innermost."""
