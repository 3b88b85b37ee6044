"""Attach chunk graphs to the model chunks of an unmodified Megatron-core model.

::

    graphs = attach(model_chunks)
    forward_backward = graphs.wrap_forward_backward(get_forward_backward_func())
    ...                               # train as before, with any number of microbatches
    graphs.detach()                   # before process groups end

The ``forward`` of a block's or model's instance is replaced; no class of Megatron changes.
Megatron's ``cuda_graph_impl`` stays ``none``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from chunkgraph.engine import Banks, CaptureOptions, ChunkGraphs, Host
from chunkgraph.engine.split import SPLIT, DelayedModules, WeightBackwards
from chunkgraph.errors import VerifyError
from chunkgraph.megatron.attached import MegatronChunkGraphs
from chunkgraph.megatron.captured_part import Scope
from chunkgraph.megatron.core.access import refuse_other_releases
from chunkgraph.megatron.core.data_parallel import facts_of_delays
from chunkgraph.megatron.core.random_state import graph_safe_generators
from chunkgraph.megatron.feature import Feature, Features
from chunkgraph.megatron.features import FEATURES
from chunkgraph.megatron.features.experts.feature import TokenDrops
from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.rerun import OverflowGuard
from chunkgraph.megatron.pipeline.choice import (
    PipelinePlace,
    PipelineSchedule,
    refuse_other_schedules,
)
from chunkgraph.megatron.pipeline.driver import ScheduleDriver
from chunkgraph.megatron.receive import SlotReceiver
from chunkgraph.megatron.refusals import DELAY_RULES, DRIVER_RULES, facts_of_model, refuse_model
from chunkgraph.megatron.site import Site, config_of, new_agreement
from chunkgraph.packing import PackedShape
from chunkgraph.settings import StashConfig
from chunkgraph.settings.rule import check, refusals

if TYPE_CHECKING:
    from chunkgraph.engine.chunk import OnCapture
    from chunkgraph.graphs import GraphBackend

__all__ = ["MegatronChunkGraphs", "attach", "config_of", "eager_driver"]


def attach(  # the options of a job, as keywords
    model_chunks: nn.Module | Sequence[nn.Module],
    *,
    scope: Scope = "auto",
    options: CaptureOptions | None = None,
    packing: PackedShape | PackingOptions | PackedBanks | None = None,
    token_drops: TokenDrops = "warn",
    stash: StashConfig | None = None,
    schedule: str = "auto",
    features: Iterable[type[Feature]] = FEATURES,
    num_slots: Sequence[int] | None = None,
    backend: GraphBackend | None = None,
    progress: OnCapture | None = None,
) -> MegatronChunkGraphs:
    """Attach chunk graphs to every chunk of this rank's model.

    Call it on every rank, after DDP has wrapped the model and a checkpoint is loaded. The model
    parallel groups must be initialized. A block is any module with the attributes ``layers``,
    ``input_tensor``, ``set_input_tensor`` and ``pre_process``.

    Args:
        model_chunks: The chunks that the schedule receives as ``model``.
        scope: ``block`` captures the transformer blocks (the stacks of a hybrid model). ``chunk``
            captures the whole forward of the model, including the embedding, the output layer and
            the loss of each token. ``auto`` captures as much of it as it can
            (`MegatronChunkGraphs.scope`).
        options: When and how to capture; default ``CaptureOptions()``.
        packing: Layout of packed sequences, the same on every rank. A `PackedShape` is one fixed
            shape; `PackingOptions` adds shorter lengths and fewer sequences;
            `PackedBanks.of_limits` is for context-parallel sizes that change. Training steps then
            take the documents or banks of their microbatches (see
            `MegatronChunkGraphs.wrap_forward_backward`), and a step with a microbatch that does
            not fit runs eagerly on all ranks.
        token_drops: Policy for tokens that an expert has no room for, which Megatron drops.
            ``count`` counts them (`Experts.dropped_tokens`). ``warn`` also warns once,
            and refuses capacity factors below 1. ``raise`` raises TokenDropError on all ranks at
            the end of the step's schedule, for which the host waits. ``rerun`` repeats
            the step eagerly on all ranks with room for all tokens, and captures again with more
            room.
        stash: Pages for what experts save for the backward, if it is enabled. A step that runs out
            of them runs again eagerly: it must begin without gradients, and its forward step keep
            no state.
        schedule: Name in `chunkgraph.schedules.list_schedules`, or a CSV file of actions, that
            replaces Megatron's schedule in training steps; ``auto`` does not.
        features: Kinds of `Feature`, in order; those that apply are installed.
        num_slots: Number of slots of each chunk. The default suffices for any number of
            microbatches at this rank's place in the pipeline.
        backend: Graph backend. The default depends on the parameters' device.
        progress: Callback after every captured graph. It receives the number of captured graphs,
            the number of all graphs of this rank, and the free bytes of the device (None if
            unknown).

    Raises:
        ConfigError: The model uses something that a chunk graph cannot hold, a chunk has no block,
            or ``packing`` differs between ranks.
        PackingError: ``packing`` asks for lengths that do not exist.
        MissingDependencyError: The model dispatches through HybridEP, which is not installed.
    """
    refuse_other_releases()
    kinds = tuple(features)
    site = Site(
        chunks=[model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks),
        requested_scope=scope,
        options=options if options is not None else CaptureOptions(),
        requested_slots=num_slots,
        requested_schedule=schedule,
    )
    if packing is not None and not isinstance(packing, PackedBanks):
        packing = PackedBanks.of_model(packing, site.config)
    site.feature_options = {"packing": packing, "token_drops": token_drops, "stash": stash}
    site.feature_facts = {name: fact for kind in kinds for name, fact in kind.facts(site).items()}
    facts = site.facts()
    refuse_model([text for kind in kinds for text in refusals(kind.rules, facts)])
    with ExitStack() as failure:
        undo = failure.enter_context(ExitStack())
        for kind in kinds:
            kind.prepare(site, undo)
        site.find_parts(undo)
        installed = Features(f for kind in kinds if (f := kind.of(site, undo)) is not None)
        chunk_graphs = _chunk_graphs(site, installed, backend, progress)
        driver = _driver(site, chunk_graphs, undo)
        receiver = SlotReceiver(
            chunk_graphs,
            site.place,
            site.config,
            lends_input_grads=site.lends_input_grads,
            device=site.device,
            driver=driver,
        )
        for part in site.parts:
            undo.callback(part.restore)
            part.divert_to(installed.call(part, partial(receiver.call, part.index)))
        graphs = MegatronChunkGraphs(site, chunk_graphs, installed, receiver, undo)
        graphs.driver = driver
        failure.callback(graphs.detach)
        installed.bind(graphs)
        if installed.repeats_steps:
            graphs.guard = OverflowGuard(graphs, undo)
        failure.pop_all()
    return graphs


def _driver(site: Site, graphs: ChunkGraphs, undo: ExitStack) -> ScheduleDriver | None:
    """Create the driver of a schedule's steps; None if Megatron's own functions run them."""
    if site.schedule is None:
        return None
    weights = WeightBackwards(graphs)
    driver = ScheduleDriver(site.schedule.build, site.place.pipeline_rank, weights.run)
    undo.callback(driver.close)
    return driver


def _chunk_graphs(
    site: Site, features: Features, backend: GraphBackend | None, progress: OnCapture | None
) -> ChunkGraphs:
    """Create the engine of the captured parts."""
    planner = features.planner
    is_split = site.schedule is not None and site.schedule.splits_backward
    program = SPLIT if is_split else None
    return ChunkGraphs(
        [
            replace(features.wrap(part), keeps_input_grads=not lends, program=program)
            for part, lends in zip(site.parts, site.lends_input_grads, strict=True)
        ],
        site.num_slots,
        options=site.options,
        agree=site.agree,
        host=_Host(features, progress),
        takes_misfits=bool(planner.inputs),
        banks=Banks(planner.keys, planner.derive, drops_failed=planner.drops_failed),
        backend=backend,
    )


class _Host(Host):
    """Adapt Megatron and the features to the engine's `Host`."""

    def __init__(self, features: Features, on_capture: OnCapture | None) -> None:
        self._features = features
        self._on_capture = on_capture

    def preserving(self) -> AbstractContextManager[None]:
        return self._features.around("session")

    def capturing(self) -> AbstractContextManager[None]:
        return self._features.around("capture")

    def verifying(self) -> AbstractContextManager[None]:
        return self._features.around("verify")

    def judge(self, wrong_replay: VerifyError) -> None:
        self._features.judge(wrong_replay)

    def generators(self) -> Sequence[torch.Generator]:
        return graph_safe_generators()

    def progress(self, num_done: int, num_graphs: int, free_bytes: int | None) -> None:
        if self._on_capture is not None:
            self._on_capture(num_done, num_graphs, free_bytes)


def eager_driver(chunks: Sequence[nn.Module], name: str) -> ScheduleDriver:
    """Return a forward-backward function that runs a schedule without graphs.

    All ranks call it together.

    Args:
        chunks: Model chunks of this rank, wrapped as for training.
        name: As `attach` takes ``schedule``.

    Raises:
        ConfigError: The schedule does not match the model, or another rank has another one.
        ScheduleError: The file holds no valid schedule.
    """
    config = config_of(chunks[0])
    place = PipelinePlace.current(len(chunks), config)
    schedule = PipelineSchedule.of(name, place)
    facts = {"schedule": name, "splits_backward": schedule.splits_backward}
    check(
        (*DRIVER_RULES, *DELAY_RULES),
        facts_of_model(config, {**facts, **facts_of_delays(chunks)}),
        "This schedule cannot drive the model:",
    )
    with ExitStack() as undo:
        refuse_other_schedules(schedule, place.rank, new_agreement(undo))
    delayed = [DelayedModules(c, place.label(i)) for i, c in enumerate(chunks)]
    return ScheduleDriver(schedule.build, place.pipeline_rank, lambda c: delayed[c].run(()))
