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

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from chunkgraph.engine import Banks, CaptureOptions, ChunkGraphs, ReplayRanges
from chunkgraph.engine.agreement import refuse_differences, refused_together
from chunkgraph.engine.split import SPLIT, DelayedModules, WeightBackwards
from chunkgraph.engine.step import StepMode
from chunkgraph.errors import ConfigError, SlotError, refuse_deepcopy
from chunkgraph.megatron.core.access import refuse_other_releases
from chunkgraph.megatron.core.agreement import before_groups_end
from chunkgraph.megatron.core.data_parallel import facts_of_delays
from chunkgraph.megatron.feature import AnyFeature, Feature, Features, Step, StepInputs, StepPlan
from chunkgraph.megatron.features import FEATURES
from chunkgraph.megatron.features.experts.feature import TokenDrops
from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.steps import StepPlans, refuse_unknown
from chunkgraph.megatron.features.rerun import OverflowGuard
from chunkgraph.megatron.model_part import Scope
from chunkgraph.megatron.optimizer import MegatronOptimizerStep
from chunkgraph.megatron.pipeline.choice import PipelinePlace, PipelineSchedule
from chunkgraph.megatron.pipeline.driver import ScheduleDriver
from chunkgraph.megatron.receive import SlotReceiver
from chunkgraph.megatron.refusals import DELAY_RULES, DRIVER_RULES, facts_of_model
from chunkgraph.megatron.site import Site, config_of, new_agreement
from chunkgraph.packing import PackedShape
from chunkgraph.settings import StashConfig
from chunkgraph.settings.rule import check

if TYPE_CHECKING:
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
    shares_memory_with: MegatronChunkGraphs | None = None,
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
        shares_memory_with: Graphs of another model whose steps never overlap with those of this
            one, such as the policy of a reference model. Slots and scratch of both lie in the same
            memory, and both sleep together.

    Raises:
        ConfigError: The model uses something that a chunk graph cannot hold, a chunk has no block,
            or ``packing`` differs between ranks.
        PackingError: ``packing`` asks for lengths that do not exist.
        MissingDependencyError: The model dispatches through HybridEP, which is not installed.
    """
    kinds = tuple(features)
    with ExitStack() as failure:
        undo = failure.enter_context(ExitStack())
        agree = new_agreement(undo)
        rank = dist.get_rank() if dist.is_initialized() else 0
        with refused_together(agree, rank) as meet:
            refuse_other_releases()
            site = Site(
                chunks=[model_chunks] if isinstance(model_chunks, nn.Module) else [*model_chunks],
                requested_scope=scope,
                options=options if options is not None else CaptureOptions(),
                requested_slots=num_slots,
                requested_schedule=schedule,
                agree=agree,
                meet=meet,
            )
            if packing is not None and not isinstance(packing, PackedBanks):
                packing = PackedBanks.of_model(packing, site.config)
            chosen = {"packing": packing, "token_drops": token_drops, "stash": stash}
            site.feature_options = chosen
            _check_features(site, kinds)
            meet()
            refuse_differences(agree, rank, site.equal_facts())
            for kind in kinds:
                kind.prepare(site, undo)
            site.find_parts()
            own = (kind.of(site, undo) for kind in kinds)
            installed = Features(feature for feature in own if feature is not None)
            graphs = MegatronChunkGraphs(site, installed, undo, backend, shares_memory_with)
            failure.callback(graphs.detach)
            for part in site.parts:
                call = partial(graphs.receiver.call, part.index)
                part.divert_to(installed.call(part, call), graphs.engine.forward_only, undo)
            installed.bind(graphs)
            if installed.repeats_steps:
                graphs.guard = OverflowGuard(graphs, undo)
        failure.pop_all()
    return graphs


def _check_features(site: Site, kinds: Sequence[type[Feature]]) -> None:
    """Collect the facts of the features, and check their rules."""
    site.feature_facts = {name: fact for kind in kinds for name, fact in kind.facts(site).items()}
    check(
        [rule for kind in kinds for rule in kind.rules],
        site.facts(),
        "Chunk graphs cannot hold this model; turn these off, or train without chunk graphs:",
    )


class MegatronChunkGraphs:
    """Chunk graphs of one rank's model, returned by :func:`attach`.

    Attributes:
        site: The model that the graphs are attached to.
        engine: The engine, which captures and replays.
        features: The installed features of the model.
        scope: The captured part of each chunk, the same on all ranks.
        num_slots: Number of slots of each chunk.
        receiver: Counts the receives into slots; explains why there are none.
        guard: Runs a step again if something had no room in it; None if no feature needs that.
        before_run: Callback before each run of a step's schedule; a repeated step has two runs.
        sleep: See `ChunkGraphs.sleep`.
        wake: See `ChunkGraphs.wake`.
    """

    __deepcopy__ = refuse_deepcopy

    def __init__(
        self,
        site: Site,
        features: Features,
        undo: ExitStack,
        backend: GraphBackend | None,
        shares_memory_with: MegatronChunkGraphs | None = None,
    ) -> None:
        is_split = site.schedule is not None and site.schedule.splits_backward
        program = SPLIT if is_split else None
        other: ChunkGraphs | None = getattr(shares_memory_with, "engine", None)
        self.engine = engine = ChunkGraphs(
            [
                replace(features.wrap(part), keeps_input_grads=not lends, program=program)
                for part, lends in zip(site.parts, site.lends_input_grads, strict=True)
            ],
            site.num_slots,
            options=site.options,
            agree=site.agree,
            host=features,
            takes_misfits=features.plans is not None,
            banks=Banks() if features.plans is None else features.plans.banks,
            backend=backend,
            schedule=site.rank_schedule,
            shares_memory_with=other,
        )
        if features.only_training:
            engine.forward_only.why_not = f"they have {features.only_training}"
        self.sleep, self.wake = engine.sleep, engine.wake
        self.site = site
        self.features = features
        self.scope = site.scope
        self.num_slots = site.num_slots
        self.guard: Any = None
        self.before_run: Callable[[], None] = lambda: None
        self._driver: ScheduleDriver | None = None
        if site.schedule is not None:
            weights = WeightBackwards(engine)
            self._driver = ScheduleDriver(
                site.schedule.build, site.place.pipeline_rank, lambda c, _: weights.run(c)
            )
            undo.callback(self._driver.close)
        self.receiver = SlotReceiver(
            engine,
            site.place,
            site.config,
            lends_input_grads=site.lends_input_grads,
            device=site.device,
            driver=self._driver,
        )
        # The model keeps this object alive until it is detached, even without other references.
        self.receiver.owner = self
        self._undo = undo
        renews = site.options.on_moved_memory == "recapture"
        self._forget_groups = before_groups_end(
            self._drop_collectives if renews else self.detach, of_any=renews
        )

    @property
    def counters(self) -> Any:
        """Return the counts of captures, replays and eager fallbacks so far."""
        return self.engine.counters

    @property
    def is_asleep(self) -> bool:
        """Return whether the graphs sleep."""
        return self.engine.is_asleep

    def find(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """Return the feature of this kind, or None; ``find(Experts).dropped_tokens()``."""
        return self.features.find(kind)

    def wrap_forward_backward(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that ``get_forward_backward_func()`` returned.

        The wrapper takes the same keywords. One call is one step: at its start graphs are
        captured, and the ranks decide between replay and eager.

        If the graphs were attached with ``packing``, training steps take more keywords:

        - ``packings``: lengths of the documents of each microbatch of this rank's data;
        - ``misfit``: a reason, known only to the caller, not to replay the step; "" for none;
        - ``buckets``: rows of each microbatch, if not those of the smallest bucket that holds it.
          With buckets, ``seq_length`` is the length of the longest one.

        With ``variable_seq_lengths`` the lengths include the padding of documents, and
        ``seq_length`` and ``micro_batch_size`` count in steps that do not fit alone. Forward-only
        steps take ``packings`` too, and are eager without them if there are several banks.

        A step that was announced (`announce`) may omit them. The caller passes
        ``packed_seq_params`` to the model on every pipeline stage, as without chunk graphs.

        If the context-parallel size changes, training steps take ``contexts``, the bank of each
        microbatch (`PackedBanks.of_schedule`), and ``misfit``.
        """
        if self._driver is not None:
            forward_backward = self._driver

        def chunk_graph_forward_backward(
            *,
            packings: Sequence[Sequence[int]] | None = None,
            misfit: str = "",
            buckets: Sequence[int] | None = None,
            contexts: Sequence[Hashable] | None = None,
            **kwargs: Any,
        ) -> Any:
            inputs, plans = StepInputs(packings, misfit, buckets, contexts), self.features.plans
            refuse_unknown(inputs, plans)
            plan = StepPlan()
            is_training = not kwargs.get("forward_only", False)
            if plans is not None and (is_training or self._driver is None):
                make = plans.plan if is_training else plans.plan_forwards
                plan = make(inputs, kwargs)
                kwargs = dict(plans.keywords(plan, kwargs))

            def run(kwargs: dict[str, Any], eager: bool) -> tuple[Any, StepMode]:
                nonlocal plan
                self.before_run()
                current = plan
                plan = plan.repeated
                return self._run_step(forward_backward, kwargs, current, eager=eager)

            if self.guard is None or not is_training:
                return run(kwargs, False)[0]
            return self.guard.run(run, kwargs)

        return chunk_graph_forward_backward

    def _run_step(
        self,
        forward_backward: Callable[..., Any],
        kwargs: dict[str, Any],
        plan: StepPlan,
        *,
        eager: bool,
    ) -> tuple[Any, StepMode]:
        """Call the schedule once; return its result, and how it ran."""
        features = self.features
        is_training = not kwargs.get("forward_only", False)
        features.begin_run()
        with (
            self.engine.step(
                kwargs["num_microbatches"],
                forward_only=not is_training,
                shape_key=tuple(kwargs.get(name) for name in _SHAPE_NAMES),
                eager=eager,
                plan=plan,
            ) as mode,
            features.step(step := Step(mode, is_training, plan)),
        ):
            if is_training and features.awaits_forwards and kwargs.get("forward_step_func"):
                kwargs = self._reporting(kwargs, step)
            # A forward-only step copies what it receives; its order has no backwards.
            receiving = mode if is_training else StepMode.EAGER
            keywords = self.receiver.begin_step(receiving, forward_backward, kwargs, plan.rows)
            return forward_backward(**keywords), mode

    def _reporting(self, kwargs: dict[str, Any], step: Step) -> dict[str, Any]:
        """Return keywords whose forward step tells the features of this rank's last forward."""
        forward_step = kwargs["forward_step_func"]
        num_left = kwargs["num_microbatches"] * len(self.site.parts)

        def counted(*args: Any, **more: Any) -> Any:
            nonlocal num_left
            result = forward_step(*args, **more)
            num_left -= 1
            if num_left == 0:
                self.features.forwards_done(step)
            return result

        return {**kwargs, "forward_step_func": counted}

    @property
    def num_banks(self) -> int:
        """Return the number of banks, that is, of graph pairs of each slot.

        There is one for each length, number of sequences and context-parallel size.
        """
        return 1 if self.features.plans is None else len(self.features.plans.banks.keys)

    @property
    def buckets(self) -> Mapping[int, PackedShape]:
        """Return the captured shapes by their rows, largest first; empty without packing.

        Each shape has the most sequences; `packed_shapes` also lists those with fewer.
        """
        return {} if self.features.plans is None else self.features.plans.shapes

    @property
    def replays_of_bank(self) -> dict[str, int]:
        """Return the number of replayed forwards by name of the bank; empty with a single bank."""
        if self.features.plans is None or not self.features.plans.names_banks:
            return {}
        return {str(bank): n for bank, n in self.engine.counters.replays_of_bank.items()}

    @property
    def packed_shapes(self) -> tuple[PackedShape, ...]:
        """Return every captured shape, largest first; a microbatch uses the smallest that fits."""
        return () if self.features.plans is None else self.features.plans.all_shapes

    def agree_on_buckets(self, packings: Sequence[Sequence[int]]) -> list[int]:
        """Return the rows of each microbatch of a step, the same on all ranks.

        All ranks must call this together. It is for ranks that share experts, whose microbatches
        pass through a chunk together.

        Raises:
            ConfigError: The graphs were attached without ``packing``, or sizes change.
        """
        return self._plans.agree_on_buckets(packings)

    def announce(
        self,
        packings: Sequence[Sequence[int]] | None = None,
        misfit: str = "",
        buckets: Sequence[int] | None = None,
        *,
        contexts: Sequence[Hashable] | None = None,
    ) -> None:
        """Announce the contents of the next training step, so that ranks agree ahead of time.

        Call it during or after the previous step. Without an announcement the ranks agree when the
        step begins, and the device waits. An announcement is binding: a rank whose step turns out
        to differ stops with an error, since the other ranks follow the announcement. Ranks may
        announce at different times, and not all have to: the others wait for a rank that does not.
        With a stash or ``token_drops="rerun"``, call it only after the previous step, which may
        run again until it ends.

        Args:
            packings: Lengths of the documents of each microbatch of the step.
            misfit: A reason not to replay the step, independent of its packings; "" for none.
            buckets: See `wrap_forward_backward`.
            contexts: The bank of each microbatch, if context-parallel sizes change.

        Raises:
            SlotError: The next step is already announced, or this call comes too early.
            ConfigError: The graphs were attached without ``packing``.
            PackingError: A microbatch has no documents, or a document has no tokens.
        """
        inputs, plans = StepInputs(packings, misfit, buckets, contexts), self._plans
        refuse_unknown(inputs, plans)
        if self.guard is not None and self.engine.mode is not StepMode.OUTSIDE:
            raise SlotError(
                "The next step was announced during a step that may run again (stash, or "
                "token_drops='rerun'). Announce it after that step."
            )
        misfit, digest = plans.announce(inputs)
        self.engine.announce(StepPlan(misfit=misfit, digest=digest))

    def withdraw(self) -> None:
        """Withdraw the announcement of the next training step, if there is one.

        This is for a loop that learns after `announce` that a different step comes next. Call it
        between the same two steps on all ranks, including those that announced nothing, or on
        none. The step then takes its contents as keywords when it begins.

        Raises:
            SlotError: A step is running.
            ConfigError: The graphs were attached without ``packing``.
        """
        plans = self._plans
        self.engine.withdraw()
        plans.withdraw()

    @property
    def _plans(self) -> StepPlans:
        if self.features.plans is None:
            raise ConfigError(
                "Chunk graphs attached without `packing` have no buckets and take no announcements."
            )
        return self.features.plans

    def capture_optimizer(self, optimizer: Any) -> MegatronOptimizerStep:
        """Let ``optimizer.step()`` replay a graph, after an eager step, until `detach`.

        All ranks call it together, before the first step. Losses, norms, zeros, parameters and
        checkpoints stay those of eager steps, to the last bit.

        Args:
            optimizer: Result of ``get_megatron_optimizer`` for this model.

        Returns:
            The step; its ``why_eager`` says why it stays eager, if it does.
        """
        step = MegatronOptimizerStep(optimizer, self.site, self.engine.backend)
        self._undo.callback(step.close)
        self.engine.memory.step_graphs[self.engine].append(step.gradients)
        return step

    def name_replays(self) -> None:
        """Name every replay in profiles by stage, chunk, action and microbatch."""
        place = self.site.place
        names = [f"stage {place.stage(c)} chunk {c}" for c in range(len(self.site.parts))]
        self.engine.observe(ReplayRanges(names))

    def release(self) -> None:
        """Free the graphs; the model stays attached and runs eagerly until the next capture."""
        self.engine.release()
        self.features.release()

    def _drop_collectives(self) -> None:
        """Drop graphs with collectives, which hold communicators; the next step captures again."""
        if self.engine.mode is not StepMode.OUTSIDE:
            return
        for step_graph in self.engine.memory.step_graphs[self.engine]:
            step_graph.release()  # its norm is summed over ranks
        sizes = [getattr(self.site.config, name, 1) or 1 for name in _GROUPS_IN_CHUNKS]
        if max(sizes) > 1:
            self.engine.drop()
            self.engine.forward_only.drop()

    def detach(self) -> None:
        """Release the graphs and restore the forward of every module.

        If one of the two fails, the other still happens. A second call does nothing.
        ``torch.distributed.destroy_process_group()`` first detaches all graphs that are still
        attached; otherwise it would wait forever for graphs that contain collectives. With
        ``on_moved_memory="recapture"`` it only drops these, and the next groups get new ones.
        """
        try:
            with ExitStack() as stack:  # runs in reverse order
                stack.callback(self._undo.close)
                stack.callback(self.release)
        finally:
            if self.engine.report is None:  # otherwise groups would still wait for the graphs
                self._forget_groups()


_GROUPS_IN_CHUNKS = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
"""Settings with which forwards and backwards have collectives; stages exchange tensors outside."""
_SHAPE_NAMES = ("seq_length", "micro_batch_size", "decoder_seq_length")
"""Keywords of the schedule that determine the shapes of a step."""


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
        refuse_differences(new_agreement(undo), place.rank, {"schedule": schedule})
    runs = [DelayedModules(c, place.label(i)).run_eagerly for i, c in enumerate(chunks)]
    return ScheduleDriver(schedule.build, place.pipeline_rank, lambda c, last: runs[c](last))
