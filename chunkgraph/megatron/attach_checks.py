"""What `attach` refuses of a model and of what is asked for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from chunkgraph.engine import CaptureOptions
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.captured_part import Scope
from chunkgraph.megatron.features.contexts import (
    ContextBanks,
    refuse_beside_contexts,
    refused_with_contexts,
)
from chunkgraph.megatron.features.contexts.attention import refuse_without_groups
from chunkgraph.megatron.features.experts.deep_ep import refuse_for_deep_ep
from chunkgraph.megatron.features.experts.feature import TokenDrops
from chunkgraph.megatron.features.experts.refusals import stash_refusals
from chunkgraph.megatron.features.fp8.feature import fp8_recipe
from chunkgraph.megatron.features.hybrid.feature import hybrid_refusals
from chunkgraph.megatron.features.packing.attention_limits import (
    needs_tokens_in_pieces,
    refuse_for_layers,
)
from chunkgraph.megatron.features.packing.params import (
    refuse_other_context,
    refuse_predictions_over_padding,
)
from chunkgraph.megatron.refusals import refuse_unsupported
from chunkgraph.megatron.scope_choice import refuse_for_scope
from chunkgraph.megatron.topology import PipelinePlace
from chunkgraph.memory.stash import StashOptions

if TYPE_CHECKING:
    from chunkgraph.packing import PackedShape

__all__ = ["refuse_for_attach"]


def refuse_for_attach(
    chunks: Sequence[nn.Module],
    config: Any,
    place: PipelinePlace,
    device: torch.device,
    *,
    scope: Scope,
    options: CaptureOptions,
    packing: PackedShape | None,
    buckets: Sequence[float],
    seq_buckets: Sequence[int],
    fills_rows: bool,
    contexts: ContextBanks | None,
    token_drops: TokenDrops,
    stash: StashOptions | None,
) -> None:
    """Check a model and what is asked of its chunk graphs.

    Args:
        chunks: the model chunks of this rank.
        config: Megatron's TransformerConfig.
        place: of the rank in the pipeline.
        device: of the parameters.
        scope: see `attach`, as all that follow.
        options: of captures.
        packing: the largest packed shape.
        buckets: shorter lengths.
        seq_buckets: fewer sequences.
        fills_rows: whether documents fill all rows.
        contexts: the banks of context-parallel sizes.
        token_drops: what is done about dropped tokens.
        stash: of the experts.

    Raises:
        ConfigError: a chunk graph cannot hold the model, or two of these cannot go together.
        MissingDependencyError: the model dispatches through DeepEP, and something is not there.
    """
    if token_drops not in get_args(TokenDrops):
        choices = ", ".join(map(repr, get_args(TokenDrops)))
        raise ConfigError(f"token_drops is {token_drops!r}; it is one of {choices}.")
    largest = packing
    if contexts is not None:
        largest = contexts.limits.shape(contexts.limits.group_sizes[0])
    also = hybrid_refusals(config, chunks, largest)
    refuse_unsupported(config, chunks, device, token_drops, also=also)
    refuse_for_scope(config, scope, is_packed=largest is not None)
    _refuse_packing(packing, config, buckets, seq_buckets, fills_rows, contexts)
    if largest is not None:
        refuse_for_layers(chunks, config, largest, device)
    if contexts is not None:
        _refuse_contexts(chunks, config, place, contexts, packing)
    refuse_for_deep_ep(config, options)
    if stash is not None and (refused := stash_refusals(config, stash.page_bytes)):
        raise ConfigError("Experts cannot stash in this model:\n  " + "\n  ".join(refused))
    if stash is not None and stash.skips_single_slots and options.shared_slots:
        raise ConfigError(
            "StashOptions(skips_single_slots=True) with shared slots: no chunk has a slot of its "
            "own. Leave one of them out."
        )


def _refuse_packing(
    packing: PackedShape | None,
    config: Any,
    buckets: Sequence[float],
    seq_buckets: Sequence[int],
    fills_rows: bool,
    contexts: ContextBanks | None,
) -> None:
    if packing is not None:
        refuse_other_context(packing, config)
        refuse_predictions_over_padding(packing, config)
        return
    if fills_rows:
        raise ConfigError("fills_rows is of packed sequences; give packing too, or leave it out.")
    for name, sizes in (("buckets", buckets), ("seq_buckets", seq_buckets)):
        if sizes:
            instead = "" if contexts is None else f", or give them to ContextBanks({name}=...)"
            raise ConfigError(
                f"{name}={list(sizes)} without packing: only packed sequences have them. Leave "
                f"them out{instead}."
            )


def _refuse_contexts(
    chunks: Sequence[nn.Module],
    config: Any,
    place: PipelinePlace,
    contexts: ContextBanks,
    packing: PackedShape | None,
) -> None:
    refuse_beside_contexts(
        packing=packing,
        fp8=fp8_recipe(config),
        context_parallel_size=getattr(config, "context_parallel_size", 1) > 1,
        **refused_with_contexts(config),
        # Megatron's schedule receives microbatches of one length, and ranks that share experts
        # send each other the same room.
        **{
            f"ContextBanks(buckets=...) {where}": (ranks or 1) > 1
            and len({key.num_tokens for key in contexts.keys}) > 1
            for where, ranks in (
                ("in a pipeline", place.pipeline_size),
                (
                    "and experts on several ranks",
                    getattr(config, "expert_model_parallel_size", 1),
                ),
            )
        },
    )
    refuse_without_groups(chunks, contexts.groups)
    if needs_tokens_in_pieces(chunks, config, contexts.limits):
        warnings.warn(
            f"rank {place.rank}: heads share keys (num_query_groups) and documents are shared "
            "by context-parallel ranks. Of short ones some pieces hold no token, whose keys "
            "Transformer Engine's attention may give gradients of memory that nobody wrote "
            "(its issue 2448), in eager training too; then graphs do not equal it. Count "
            "padding as tokens: ContextLimits(..., counts_padding=True).",
            stacklevel=4,
        )
