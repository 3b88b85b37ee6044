"""What `attach` gives back: the chunk graphs of one rank's Megatron model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from chunkgraph.engine import ChunkGraphs
from chunkgraph.engine.decide.reasons import StepMode
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.megatron.core.process_groups import before_groups_end
from chunkgraph.megatron.feature import Features
from chunkgraph.megatron.features.contexts.key import ContextBank
from chunkgraph.megatron.features.experts.feature import Experts
from chunkgraph.megatron.features.packing.steps import Packings
from chunkgraph.megatron.features.rerun.last_forward import telling_last_forward
from chunkgraph.megatron.features.stash.feature import ExpertStash
from chunkgraph.megatron.receive import SlotReceiver
from chunkgraph.megatron.site import Site
from chunkgraph.megatron.step import Step, StepInputs, StepPlan

if TYPE_CHECKING:
    from chunkgraph.megatron.features.rerun.guard import OverflowGuard
    from chunkgraph.packing import PackedShape

__all__ = ["MegatronChunkGraphs"]


class MegatronChunkGraphs:
    """Chunk graphs of one rank's model, made by :func:`attach`.

    Attributes:
        site: the model that they are attached to.
        engine: the chunk graphs themselves.
        features: what the model needs so that its chunks can be captured.
        scope: the captured part of each chunk, the same on all ranks.
        num_slots: slots of each chunk.
        receiver: counts what was received into slots, and says why if nothing is.
        guard: runs steps again in which something had no room, or None.
        before_run: called before each run of a step's schedule; a step that runs again has two.
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
        self.guard: OverflowGuard | None = None
        self.before_run: Callable[[], None] = lambda: None
        self._undo = undo
        self._forget_groups = before_groups_end(self.detach)
        # Whoever drops this has not detached it: the model still holds the graphs.
        receiver.owner = self

    @property
    def counters(self) -> Any:
        """Captures, replays and eager fallbacks so far."""
        return self.engine.counters

    @property
    def stash(self) -> ExpertStash | None:
        """The stash of the experts, or None."""
        return self.features.find(ExpertStash)

    def dropped_tokens(self, *, wait: bool = False) -> dict[int, int]:
        """How often an expert had no room for a token that chose it, so far, on this rank.

        A token that found no room at two of its experts counts twice. Forwards without gradients
        are not counted. With a rank budget it is how many dispatches were over it.

        Args:
            wait: for the device, so that the last step is in it; by default the count is as of the
                last step whose count has arrived.

        Returns:
            Layer number, from 1, -> count; empty where there are no experts.
        """
        experts = self.features.find(Experts)
        return {} if experts is None else experts.dropped_tokens(wait=wait)

    def wrap_forward_backward(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what ``get_forward_backward_func()`` returned; call it with the same keywords.

        One call is one step: graphs are captured, and replay or eager is decided, at its start.

        Attached with ``packing``, it takes more keywords for training steps: ``packings``, the
        lengths of the documents of each microbatch of this rank's data; ``misfit``, why the step is
        not to be replayed for reasons that only the caller knows (default "": none); and
        ``buckets``, the rows of each microbatch where they are not those of the smallest bucket
        that holds it. With buckets, ``seq_length`` is that of the longest. All of them
        may be left out of a step that was announced (`announce`). The caller passes
        ``packed_seq_params`` to the model on every pipeline stage, as without chunk graphs.

        Attached with `ContextBanks`, training steps take ``contexts``, the bank of each microbatch
        (`ContextBanks.of_schedule`), and ``misfit``.
        """

        def chunk_graph_forward_backward(
            *,
            packings: Packings | None = None,
            misfit: str = "",
            buckets: Sequence[int] | None = None,
            contexts: Sequence[ContextBank] | None = None,
            **kwargs: Any,
        ) -> Any:
            inputs = StepInputs(packings, misfit, buckets, contexts)
            self.features.planner.refuse_unknown(inputs)
            plan = StepPlan()  # nobody has to know what an evaluation step holds: it is eager
            is_training = not kwargs.get("forward_only", False)
            if is_training:
                plan = self.features.planner.plan(inputs, kwargs)

            def run(kwargs: dict[str, Any], eager: bool) -> tuple[Any, StepMode]:
                nonlocal plan
                self.before_run()
                this = plan
                plan = plan.repeated
                return self._run_step(forward_backward, kwargs, this, eager=eager)

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
        with (
            self._abandoning(is_training=is_training),
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
                kwargs = telling_last_forward(
                    kwargs,
                    len(self.site.parts),
                    partial(features.forwards_done, step),
                    features.forwards_resumed,
                )
            given = self.receiver.begin_step(mode, forward_backward, kwargs, plan.rows)
            result = forward_backward(**given)
        features.end_step(step)
        return result, mode

    @contextmanager
    def _abandoning(self, *, is_training: bool) -> Iterator[None]:
        """Let features drop what a run left that fails, in its schedule or after it."""
        try:
            yield
        except BaseException:
            self.features.abandon_step(is_training=is_training)
            raise

    @property
    def num_banks(self) -> int:
        """Graph pairs of each slot: one for each length, number of sequences and size."""
        return len(self.features.planner.keys)

    @property
    def context_banks(self) -> tuple[ContextBank, ...]:
        """Those of each context-parallel size that is captured; empty where the size is fixed."""
        return tuple(key for key in self.features.planner.keys if isinstance(key, ContextBank))

    @property
    def buckets(self) -> Mapping[int, PackedShape]:
        """By its rows, each shape that is captured, largest first; empty without packing.

        Each with the most sequences; `packed_shapes` has those with fewer, too.
        """
        return self.features.planner.shapes

    @property
    def replays_of_bank(self) -> dict[str, int]:
        """Forwards replayed so far by bank, as a user knows it; empty where there is one."""
        counts = self.engine.counters.replays_of_bank
        name = self.features.planner.name
        return {name(bank): count for bank, count in counts.items() if name(bank)}

    @property
    def packed_shapes(self) -> tuple[PackedShape, ...]:
        """Every shape that is captured, largest first; a microbatch gets the smallest that fits."""
        return tuple(self.features.planner.all_shapes)

    def agree_on_buckets(self, packings: Packings) -> list[int]:
        """Rows of each microbatch of a step, the same on all ranks; all of them call it together.

        For ranks that share experts, whose microbatches go through a chunk together.
        """
        return self.features.planner.agree_on_buckets(packings)

    def announce(
        self,
        packings: Packings | None = None,
        misfit: str = "",
        buckets: Sequence[int] | None = None,
        *,
        contexts: Sequence[ContextBank] | None = None,
    ) -> None:
        """Say what the next training step holds, so that the ranks agree while this one runs.

        Call it during the step before, or after it. Without it they agree when the step begins,
        for which the device waits. What is announced binds: a rank whose step then turns out to be
        another one stops with an error, since the others follow what they were told. Ranks need
        not all announce, nor at the same time: one that does not is waited for. With a stash or
        ``token_drops="rerun"``, only after it: until then it may be run once more.

        Args:
            packings: lengths of the documents of each microbatch of the step.
            misfit: why the step is not to be replayed whatever its packings, or "".
            buckets: see `wrap_forward_backward`.
            contexts: the bank of each microbatch, where attached with `ContextBanks`.

        Raises:
            SlotError: the next step was announced already, or too early.
            ConfigError: attached without ``packing``.
            PackingError: a microbatch without documents, or a document without tokens.
        """
        inputs = StepInputs(packings, misfit, buckets, contexts)
        self.features.planner.refuse_unknown(inputs)
        if self.guard is not None and self.engine.mode is not StepMode.OUTSIDE:
            raise SlotError(
                "The next step was announced while one runs that may be run anew (stash, or "
                "token_drops='rerun'). Announce it after that one."
            )
        misfit, digest = self.features.planner.announce(inputs)
        self.engine.announce(misfit, plan_digest=digest)

    def withdraw(self) -> None:
        """Take back the announcement of the next training step, if there is one.

        For a loop that finds, behind `announce`, that another step comes. Call it between the same
        two steps on all ranks, those too that announced nothing, or on none. The step is then told
        what it holds when it begins.

        Raises:
            SlotError: a step is running.
            ConfigError: attached without ``packing``.
        """
        if not self.features.planner.inputs:
            raise ConfigError("Chunk graphs attached without `packing` are announced no steps.")
        self.engine.withdraw()
        self.features.planner.withdraw()

    def name_replays(self) -> None:
        """Name every replay in profiles by stage, chunk, action and microbatch."""
        place = self.site.place
        self.engine.name_replays(
            [f"stage {place.stage(c)} chunk {c}" for c in range(len(self.site.parts))]
        )

    def release(self) -> None:
        """Drop graphs and their memory; the model stays attached, eager until captured again."""
        self.engine.release()
        self.features.release()

    def detach(self) -> None:
        """Release the graphs and give every module its own forward back.

        Whatever goes wrong in one of the two, the other is done. Detaching again does nothing.
        ``torch.distributed.destroy_process_group()`` detaches first what still is attached: it
        would wait for ever for graphs that hold collectives.
        """
        try:
            with ExitStack() as stack:  # from the last to the first
                stack.callback(self._undo.close)
                stack.callback(self.release)
        finally:
            if self.engine.report is None:  # else groups would still wait for the graphs
                self._forget_groups()


_SHAPE_NAMES = ("seq_length", "micro_batch_size", "decoder_seq_length")
"""Keywords of the schedule that fix the shapes of a step."""
