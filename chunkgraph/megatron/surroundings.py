"""What surrounds captures and eager passes of Megatron's chunks, and what follows its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from chunkgraph.engine import Chunk
from chunkgraph.megatron.captured_part import CapturedPart
from chunkgraph.megatron.core.attention_choice import same_attention
from chunkgraph.megatron.core.cached_tables import CachedTables
from chunkgraph.megatron.core.capture_flag import capture_flag
from chunkgraph.megatron.core.random_state import preserve_rng
from chunkgraph.megatron.core.recompute import recomputing
from chunkgraph.megatron.features.experts.feature import Experts, both
from chunkgraph.megatron.features.fp8.feature import Fp8State, fp8_recipe
from chunkgraph.megatron.features.hybrid.layers import packed_mamba_rows
from chunkgraph.megatron.features.packing.rope import packed_rope
from chunkgraph.megatron.features.prediction.feature import TokenPrediction
from chunkgraph.megatron.features.stash.feature import ExpertStash

__all__ = [
    "capturing",
    "following",
    "fp8_state",
    "predicts_tokens",
    "preserving",
    "running_beside",
]


@contextmanager
def running_beside(
    fp8: Fp8State | None,
    predictions: TokenPrediction | None,
    pages: ExpertStash | None,
) -> Iterator[None]:
    """Around an eager pass of ``verify``: DDP's hooks keep silent, as in a capture."""
    with ExitStack() as stack:
        stack.enter_context(same_attention())
        stack.enter_context(capture_flag())
        stack.enter_context(recomputing())
        stack.enter_context(packed_mamba_rows())
        if fp8 is not None:
            stack.enter_context(fp8.beside())
        if predictions is not None:
            stack.enter_context(predictions.beside())
        if pages is not None:
            stack.enter_context(pages.beside())
        yield


@contextmanager
def preserving(fp8: Fp8State | None) -> Iterator[None]:
    """Around a capture session: random and FP8 state are put back."""
    with preserve_rng(), fp8.preserved() if fp8 else nullcontext():
        yield


@contextmanager
def capturing(
    tables: CachedTables,
    predictions: TokenPrediction | None,
    fp8: Fp8State | None,
    experts: Experts | None,
    pages: ExpertStash | None,
) -> Iterator[None]:
    """Around captures: Megatron knows of them, and what it keeps in Python suits a graph."""
    with ExitStack() as stack:
        stack.enter_context(capture_flag())
        stack.enter_context(recomputing())
        stack.enter_context(packed_rope())
        stack.enter_context(packed_mamba_rows())
        stack.enter_context(tables.held())
        if fp8 is not None:
            stack.enter_context(fp8.capturing())
        if predictions is not None:
            stack.enter_context(predictions.capturing())
        if experts is not None:
            stack.enter_context(experts.capturing())
        if pages is not None:
            stack.enter_context(pages.capturing())
        yield


def predicts_tokens(parts: Sequence[CapturedPart]) -> bool:
    """Whether one of them predicts several tokens at once."""
    return any(getattr(part.module, "mtp_process", False) for part in parts)


def fp8_state(config: Any, parts: Sequence[CapturedPart], device: torch.device) -> Fp8State | None:
    """The FP8 state of the captured parts; None without FP8."""
    recipe = fp8_recipe(config)
    if recipe is None:
        return None
    return Fp8State(
        [part.modules for part in parts],
        [part.label for part in parts],
        device,
        is_delayed=recipe == "delayed",
    )


def following(
    index: int,
    part: CapturedPart,
    predictions: TokenPrediction | None,
    fp8: Fp8State | None,
    experts: Experts | None,
    pages: ExpertStash | None,
) -> Chunk:
    """Chunk ``index``, following what Megatron and Transformer Engine keep in Python."""
    chunk = _following_megatron(part, predictions, experts)
    if pages is not None:
        chunk = pages.following(index, chunk)
    return chunk if fp8 is None else fp8.follow(index, chunk)


def _following_megatron(
    part: CapturedPart, predictions: TokenPrediction | None, experts: Experts | None
) -> Chunk:
    """The part's chunk; it follows Megatron's state of experts and of the tokens it predicts."""
    chunk = part.chunk()
    if experts is not None:
        chunk = experts.following(part, chunk)
    if predictions is None or not getattr(part.module, "mtp_process", False):
        return chunk
    return replace(
        chunk,
        before_forward=both(chunk.before_forward, predictions.before_forward),
        before_backward=both(chunk.before_backward, predictions.before_backward),
    )
