"""`MegatronChunkGraphs`: the chunk graphs of one rank's Megatron model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from chunkgraph.engine import ChunkGraphs
from chunkgraph.engine.decide import StepMode
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.megatron.core.agreement import before_groups_end
from chunkgraph.megatron.feature import AnyFeature, Features, Step, StepInputs, StepPlan
from chunkgraph.megatron.pipeline.driver import ScheduleDriver
from chunkgraph.megatron.receive import SlotReceiver
from chunkgraph.megatron.site import Site

if TYPE_CHECKING:
    from chunkgraph.packing import PackedShape

__all__ = ["MegatronChunkGraphs", "notify_after_last_forward"]


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
    """

    def __init__(
        self,
        site: Site,
        engine: ChunkGraphs,
        features: Features,
        receiver: SlotReceiver,
        undo: ExitStack,
    ) -> None:
        self.site = site
        self.engine = engine
        self.features = features
        self.scope = site.scope
        self.num_slots = site.num_slots
        self.receiver = receiver
        self.guard: Any = None
        self.driver: ScheduleDriver | None = None
        self.before_run: Callable[[], None] = lambda: None
        self._undo = undo
        self._forget_groups = before_groups_end(self.detach)
        # The model keeps this object alive until it is detached, even without other references.
        receiver.owner = self

    @property
    def counters(self) -> Any:
        """Return the counts of captures, replays and eager fallbacks so far."""
        return self.engine.counters

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

        A step that was announced (`announce`) may omit them. The caller passes
        ``packed_seq_params`` to the model on every pipeline stage, as without chunk graphs.

        If the context-parallel size changes, training steps take ``contexts``, the bank of each
        microbatch (`PackedBanks.of_schedule`), and ``misfit``.
        """
        if self.driver is not None:
            forward_backward = self.driver

        def chunk_graph_forward_backward(
            *,
            packings: Sequence[Sequence[int]] | None = None,
            misfit: str = "",
            buckets: Sequence[int] | None = None,
            contexts: Sequence[Hashable] | None = None,
            **kwargs: Any,
        ) -> Any:
            inputs = StepInputs(packings, misfit, buckets, contexts)
            self.features.planner.refuse_unknown(inputs)
            plan = StepPlan()  # an evaluation step is eager and needs no plan
            is_training = not kwargs.get("forward_only", False)
            if is_training:
                plan = self.features.planner.plan(inputs, kwargs)

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
                misfit=plan.misfit,
                banks=plan.banks,
                plan_digest=plan.digest,
            ) as mode,
            features.step(step := Step(mode, is_training, plan)),
        ):
            if is_training and features.awaits_forwards:
                kwargs = notify_after_last_forward(
                    kwargs,
                    len(self.site.parts),
                    partial(features.forwards_done, step),
                )
            keywords = self.receiver.begin_step(mode, forward_backward, kwargs, plan.rows)
            return forward_backward(**keywords), mode

    @property
    def num_banks(self) -> int:
        """Return the number of banks, that is, of graph pairs of each slot.

        There is one for each length, number of sequences and context-parallel size.
        """
        return len(self.features.planner.keys)

    @property
    def buckets(self) -> Mapping[int, PackedShape]:
        """Return the captured shapes by their rows, largest first; empty without packing.

        Each shape has the most sequences; `packed_shapes` also lists those with fewer.
        """
        return self.features.planner.shapes

    @property
    def replays_of_bank(self) -> dict[str, int]:
        """Return the number of replayed forwards by name of the bank; empty with a single bank."""
        counts = self.engine.counters.replays_of_bank
        name = self.features.planner.name
        return {name(bank): count for bank, count in counts.items() if name(bank)}

    @property
    def packed_shapes(self) -> tuple[PackedShape, ...]:
        """Return every captured shape, largest first; a microbatch uses the smallest that fits."""
        return tuple(self.features.planner.all_shapes)

    def agree_on_buckets(self, packings: Sequence[Sequence[int]]) -> list[int]:
        """Return the rows of each microbatch of a step, the same on all ranks.

        All ranks must call this together. It is for ranks that share experts, whose microbatches
        pass through a chunk together.
        """
        return self.features.planner.agree_on_buckets(packings)

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
        inputs = StepInputs(packings, misfit, buckets, contexts)
        self.features.planner.refuse_unknown(inputs)
        if self.guard is not None and self.engine.mode is not StepMode.OUTSIDE:
            raise SlotError(
                "The next step was announced during a step that may run again (stash, or "
                "token_drops='rerun'). Announce it after that step."
            )
        misfit, digest = self.features.planner.announce(inputs)
        self.engine.announce(misfit, plan_digest=digest)

    def withdraw(self) -> None:
        """Withdraw the announcement of the next training step, if there is one.

        This is for a loop that learns after `announce` that a different step comes next. Call it
        between the same two steps on all ranks, including those that announced nothing, or on
        none. The step then takes its contents as keywords when it begins.

        Raises:
            SlotError: A step is running.
            ConfigError: The graphs were attached without ``packing``.
        """
        if not self.features.planner.inputs:
            raise ConfigError("Chunk graphs attached without `packing` take no announcements.")
        self.engine.withdraw()
        self.features.planner.withdraw()

    def name_replays(self) -> None:
        """Name every replay in profiles by stage, chunk, action and microbatch."""
        place = self.site.place
        self.engine.name_replays(
            [f"stage {place.stage(c)} chunk {c}" for c in range(len(self.site.parts))]
        )

    def release(self) -> None:
        """Free the graphs; the model stays attached and runs eagerly until the next capture."""
        self.engine.release()
        self.features.release()

    def detach(self) -> None:
        """Release the graphs and restore the forward of every module.

        If one of the two fails, the other still happens. A second call does nothing.
        ``torch.distributed.destroy_process_group()`` first detaches all graphs that are still
        attached; otherwise it would wait forever for graphs that contain collectives.
        """
        try:
            with ExitStack() as stack:  # runs in reverse order
                stack.callback(self._undo.close)
                stack.callback(self.release)
        finally:
            if self.engine.report is None:  # otherwise groups would still wait for the graphs
                self._forget_groups()


_SHAPE_NAMES = ("seq_length", "micro_batch_size", "decoder_seq_length")
"""Keywords of the schedule that determine the shapes of a step."""


def notify_after_last_forward(
    kwargs: dict[str, Any],
    num_chunks: int,
    done: Callable[[], None],
) -> dict[str, Any]:
    """Return a schedule's keywords that make it call ``done`` after this rank's last forward.

    A rank runs one forward for each microbatch and model chunk.

    Args:
        kwargs: Keywords of the schedule; not modified.
        num_chunks: Number of model chunks of this rank.
        done: Callback on the host after the last forward is queued.
    """
    forward_step = kwargs.get("forward_step_func")
    if forward_step is None:
        return kwargs
    num_left = kwargs["num_microbatches"] * num_chunks

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal num_left
        result = forward_step(*args, **more)
        num_left -= 1
        if num_left == 0:
            done()
        return result

    return {**kwargs, "forward_step_func": counted}
