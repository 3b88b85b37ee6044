"""Attach chunk graphs to the model chunks of an unmodified Megatron-core model.

::

    graphs = attach(model_chunks)
    forward_backward = graphs.wrap_forward_backward(get_forward_backward_func())
    ...                               # train as before, with any number of microbatches
    graphs.detach()                   # before process groups end

An instance of a block or model gets a ``forward`` of its own; nothing of Megatron is replaced.
Megatron's own ``cuda_graph_impl`` stays ``none``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import nn

from chunkgraph.engine import Banks, CaptureOptions, ChunkGraphs, Host
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.attached import MegatronChunkGraphs
from chunkgraph.megatron.captured_part import Scope
from chunkgraph.megatron.core.access import refuse_other_releases
from chunkgraph.megatron.core.random_state import graph_safe_generators
from chunkgraph.megatron.feature import Feature, Features
from chunkgraph.megatron.features import FEATURES
from chunkgraph.megatron.features.contexts import ContextBanks
from chunkgraph.megatron.features.experts.feature import TokenDrops
from chunkgraph.megatron.features.packing.options import PackingOptions
from chunkgraph.megatron.features.rerun.guard import OverflowGuard
from chunkgraph.megatron.receive import SlotReceiver
from chunkgraph.megatron.refusals import refuse_model
from chunkgraph.megatron.site import Site, config_of
from chunkgraph.memory.stash import StashOptions
from chunkgraph.packing import PackedShape
from chunkgraph.settings.rule import refusals

if TYPE_CHECKING:
    from chunkgraph.engine.options import OnCapture
    from chunkgraph.graphs import GraphBackend

__all__ = ["EngineOptions", "MegatronChunkGraphs", "attach", "config_of"]


class EngineOptions(TypedDict, total=False):
    """Further keywords of `attach`, which it hands on to `ChunkGraphs`.

    Attributes:
        num_slots: slots of each chunk; default what this rank's place in the pipeline needs for
            any number of microbatches.
        backend: graphs to use; default by the parameters' device.
        progress: called after every captured graph with graphs captured, all graphs of this rank
            and bytes left on the device (None: unknown).
    """

    num_slots: Sequence[int] | None
    backend: GraphBackend | None
    progress: OnCapture | None


def attach(
    model_chunks: nn.Module | Sequence[nn.Module],
    *,
    scope: Scope = "auto",
    options: CaptureOptions | None = None,
    packing: PackedShape | PackingOptions | ContextBanks | None = None,
    token_drops: TokenDrops = "warn",
    stash: StashOptions | None = None,
    zero_copy: bool = True,
    features: Iterable[type[Feature]] = FEATURES,
    **engine: Unpack[EngineOptions],
) -> MegatronChunkGraphs:
    """Give every one of ``model_chunks`` chunk graphs.

    Call it on every rank, after DDP has wrapped the model and a checkpoint is loaded; the model
    parallel groups must be set up. Blocks are recognised by their attributes, so any module with
    ``layers``, ``input_tensor``, ``set_input_tensor`` and ``pre_process`` is one.

    Args:
        model_chunks: what is given to the schedule as ``model``.
        scope: ``block`` captures the transformer blocks (of a hybrid model: its stacks), ``chunk``
            all of the model's forward: embedding, output layer and the loss of each token with
            them; ``auto`` as much of that as can be captured (`MegatronChunkGraphs.scope`).
        options: when and how to capture; default ``CaptureOptions()``.
        packing: how packed sequences look, the same on every rank. A `PackedShape`: one fixed
            shape. `PackingOptions`: also shorter lengths and fewer sequences. Every training step
            is then given all documents of its microbatches
            (`MegatronChunkGraphs.wrap_forward_backward` says how); a step with a microbatch that
            does not fit runs eagerly on all ranks. `ContextBanks`: the context-parallel size
            changes. Every training step is then given the bank of each microbatch, and its
            ``packed_seq_params`` say ``cp_group`` and ``local_cp_size``; the model is built with a
            static context-parallel size of 1, and `contexts.follow_groups` tells its attention. A
            step with a size that is not captured runs eagerly on all ranks.
        token_drops: what is done about tokens that an expert has no room for, which Megatron drops:
            ``count`` them (`MegatronChunkGraphs.dropped_tokens`); count them and ``warn`` at the
            first, with capacity factors below 1 refused; or ``raise`` TokenDropError on all ranks
            at the end of the step's schedule, for which the host then waits; or ``rerun`` such a
            step eagerly with room for all, on all ranks, and capture again with more room, at most
            ``stash.max_recaptures`` times (2 without ``stash``). With DeepEP and a
            budget of each rank only ``raise`` and ``rerun``: it tells no more than that a rank was
            over its budget.
        stash: what experts save for the backward in pages, only rows that hold a token; measured in
            the eager steps before the capture. A step in which pages ran out runs again eagerly:
            it must begin without gradients, and its ``forward_step_func`` keep no state of its own.
        zero_copy: receive from other stages straight into slots, and send input gradients from
            them, where that is safe; False copies them, with the same numbers.
        features: kinds of `Feature`, in order; the ones that apply are installed.
        engine: see `EngineOptions`.

    Raises:
        ConfigError: the model uses something a chunk graph cannot hold, no block was found, or
            ``packing`` differs between ranks.
        PackingError: there are no lengths such as ``packing`` asks for.
        MissingDependencyError: the model dispatches through DeepEP, and something that a graph
            of it needs is not there.
    """
    _refuse_unknown(engine)
    refuse_other_releases()
    kinds = tuple(features)
    site = Site(
        chunks=[model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks),
        asked_scope=scope,
        options=options if options is not None else CaptureOptions(),
        packing=PackingOptions(packing) if isinstance(packing, PackedShape) else packing,
        token_drops=token_drops,
        stash=stash,
        zero_copy=zero_copy,
        asked_slots=engine.pop("num_slots", None),
    )
    facts = site.facts(fact for kind in kinds for fact in kind.facts(site).items())
    refuse_model([text for kind in kinds for text in refusals(kind.rules, facts)])
    for kind in kinds:
        kind.check(site)
    with ExitStack() as failure:
        undo = failure.enter_context(ExitStack())
        site.find_parts(undo)
        own = Features.install_on(site, kinds, undo)
        chunk_graphs = _chunk_graphs(site, own, **engine)
        receiver = SlotReceiver(
            chunk_graphs,
            site.place,
            site.config,
            wanted=zero_copy,
            lends_input_grads=site.lends_input_grads,
            device=site.device,
        )
        for part in site.parts:
            undo.callback(part.restore)
            part.divert_to(own.call(part, partial(receiver.call, part.index)))
        graphs = MegatronChunkGraphs(site, chunk_graphs, own, receiver, undo)
        failure.callback(graphs.detach)
        own.bind(graphs)
        if own.repeats_steps:
            graphs.guard = OverflowGuard.of(graphs, undo)
        failure.pop_all()
    return graphs


def _chunk_graphs(site: Site, features: Features, **engine: Any) -> ChunkGraphs:
    """Make the engine of the captured parts."""
    planner = features.planner
    return ChunkGraphs(
        [
            replace(features.wrap(part), keeps_input_grads=not lends)
            for part, lends in zip(site.parts, site.lends_input_grads, strict=True)
        ],
        site.num_slots,
        options=site.options,
        agree=site.agree,
        host=_Host(features, engine.pop("progress", None)),
        takes_misfits=bool(planner.inputs),
        banks=Banks(planner.keys, planner.derive, drops_failed=planner.drops_failed),
        **engine,
    )


class _Host(Host):
    """Megatron and the features, as the engine meets them in a capture session."""

    def __init__(self, features: Features, on_capture: OnCapture | None) -> None:
        self._features = features
        self._on_capture = on_capture

    def preserving(self) -> AbstractContextManager[None]:
        return self._features.preserving()

    def capturing(self) -> AbstractContextManager[None]:
        return self._features.capturing()

    def beside(self) -> AbstractContextManager[None]:
        return self._features.beside()

    def generators(self) -> Sequence[torch.Generator]:
        return graph_safe_generators()

    def progress(self, num_done: int, num_graphs: int, free_bytes: int | None) -> None:
        if self._on_capture is not None:
            self._on_capture(num_done, num_graphs, free_bytes)


_SUCCESSORS = {
    **dict.fromkeys(
        ("buckets", "seq_buckets", "fills_rows"),
        "packing=PackingOptions(shape, {name}=...), or ContextBanks(..., {name}=...) where the "
        "context-parallel size changes",
    ),
    "contexts": "packing=ContextBanks(...)",
}
"""What replaces keywords of earlier releases."""


def _refuse_unknown(keywords: Iterable[str]) -> None:
    """Refuse keywords that `attach` does not take, and name what replaces them.

    Raises:
        ConfigError: there is one.
    """
    for name in keywords:
        if name in EngineOptions.__annotations__:
            continue
        successor = _SUCCESSORS.get(name)
        instead = f" Give it {successor.format(name=name)}." if successor else ""
        raise ConfigError(f"attach() takes no {name}=....{instead}")
