"""What `attach` gives back: the chunk graphs of one rank's Megatron model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from chunkgraph.engine import ChunkGraphs
from chunkgraph.engine.decide.reasons import StepMode
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.megatron.captured_part import CapturedPart
from chunkgraph.megatron.core.cached_tables import CachedTables
from chunkgraph.megatron.core.gloo_agreement import Maximum
from chunkgraph.megatron.core.process_groups import before_groups_end
from chunkgraph.megatron.features.contexts import (
    ContextBank,
    HeldGroups,
    StepContexts,
    digest_of_plan,
)
from chunkgraph.megatron.features.experts.feature import Experts
from chunkgraph.megatron.features.fp8.feature import Fp8State
from chunkgraph.megatron.features.packing.offset_cutter import OffsetCutter
from chunkgraph.megatron.features.packing.steps import Packings, StepPackings
from chunkgraph.megatron.features.rerun.guard import OverflowGuard
from chunkgraph.megatron.features.rerun.last_forward import telling_last_forward
from chunkgraph.megatron.features.stash.feature import ExpertStash
from chunkgraph.megatron.receive import SlotReceiver
from chunkgraph.megatron.scope_choice import ChosenScope

if TYPE_CHECKING:
    from chunkgraph.packing import PackedShape

__all__ = ["MegatronChunkGraphs"]


class MegatronChunkGraphs:
    """Chunk graphs of one rank's model, made by :func:`attach`.

    Attributes:
        engine: the chunk graphs themselves.
        scope: the captured part of each chunk, the same on all ranks.
        num_slots: slots of each chunk.
        receiver: counts what was received into slots, and says why if nothing is.
        guard: runs steps anew in which something had no room, or None.
        before_run: called before each run of a step's schedule; a step that is run anew has two.
        stash: of the experts, or None.
    """

    def __init__(
        self,
        engine: ChunkGraphs,
        parts: Sequence[CapturedPart],
        scope: ChosenScope,
        num_slots: tuple[int, ...],
        held: Sequence[CachedTables | Fp8State],
        receiver: SlotReceiver,
        names: Sequence[str],
        experts: Experts | None = None,
        packings: StepPackings | None = None,
        stash: ExpertStash | None = None,
        *,
        contexts: StepContexts | None = None,
        held_groups: HeldGroups | None = None,
        cutter: OffsetCutter | None = None,
        agree: Maximum | None = None,
        agree_on_buckets: Maximum | None = None,
    ) -> None:
        self.engine = engine
        self.guard: OverflowGuard | None = None
        self.before_run: Callable[[], None] = lambda: None
        self.stash = stash
        self.scope = scope
        self.num_slots = num_slots
        self.receiver = receiver
        self._parts = tuple(parts)
        self._held = tuple(held)
        self._names = tuple(names)
        self._experts = experts
        self._packings = packings
        self._contexts = contexts
        self._held_groups = held_groups
        self._cutter = cutter
        self._agree = agree
        self._agree_on_buckets = agree_on_buckets
        self._forget_groups = before_groups_end(self.detach)
        # Whoever drops this has not detached it: the model still holds the graphs.
        receiver.owner = self

    @property
    def counters(self) -> Any:
        """Captures, replays and eager fallbacks so far."""
        return self.engine.counters

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
        return self._experts.dropped_tokens(wait=wait) if self._experts is not None else {}

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

        Attached with ``contexts``, training steps take ``contexts``, the bank of each microbatch
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
            told: str | None = None
            keys: Sequence[Hashable] | None = None
            rows: Sequence[int] | None = None
            self._refuse_unknown(packings, buckets, contexts, misfit)
            if self._packings is not None or self._contexts is not None:
                _refuse_other_length(kwargs)
            if kwargs.get("forward_only", False):
                pass  # nobody has to know what an evaluation step holds: it is eager
            elif self._contexts is not None:
                count = kwargs["num_microbatches"]
                told, keys = self._contexts.begin(contexts, misfit, count)
            elif self._packings is not None:
                count = kwargs["num_microbatches"]
                told = self._packings.begin(packings, misfit, count, buckets)
                if len(self._packings.buckets.banks) > 1:
                    keys = self._packings.banks
                if len(self._packings.buckets.keys) > 1:
                    rows = self._packings.rows(kwargs.get("seq_length"))
            shape_key = tuple(
                kwargs.get(name)
                for name in ("seq_length", "micro_batch_size", "decoder_seq_length")
            )

            def run(kwargs: dict[str, Any], eager: bool) -> tuple[Any, StepMode]:
                nonlocal told
                self.before_run()
                word = told
                of_step = self._packings if self._contexts is None else self._contexts
                if of_step is not None and not kwargs.get("forward_only", False):
                    told = of_step.misfit  # an announcement holds for the first run alone
                if self._cutter is not None:
                    of_run: Sequence[Hashable] = keys or ()
                    if of_run and self._packings is not None:
                        of_run = self._packings.cut_for
                    self._cutter.begin_run(of_run)
                return self._run_step(
                    forward_backward, kwargs, shape_key, word, keys, rows, eager=eager
                )

            if self.guard is None or kwargs.get("forward_only"):
                return run(kwargs, False)[0]
            return self.guard.run(run, kwargs)

        return chunk_graph_forward_backward

    def _refuse_unknown(
        self,
        packings: Packings | None,
        buckets: Sequence[int] | None,
        contexts: Sequence[ContextBank] | None,
        misfit: str,
    ) -> None:
        """Stop if a step is told what these chunk graphs know nothing of."""
        is_packed = self._packings is not None
        if not is_packed and (packings is not None or buckets is not None):
            raise ConfigError(
                "The step was given packings, but the chunk graphs know of no packing. Give "
                "attach() the shape: attach(..., packing=PackedShape(...))."
            )
        if self._contexts is None and contexts is not None:
            raise ConfigError(
                "The step was given contexts, but the chunk graphs know of none. Give attach() "
                "the banks: attach(..., contexts=ContextBanks(...))."
            )
        if misfit and not is_packed and self._contexts is None:
            raise ConfigError(
                f"The step was told a misfit ({misfit}), which chunk graphs know of that were "
                "attached with `packing` or `contexts`. Leave it out."
            )

    def _run_step(
        self,
        forward_backward: Callable[..., Any],
        kwargs: dict[str, Any],
        shape_key: tuple[Any, ...],
        told: str | None,
        keys: Sequence[Hashable] | None,
        rows: Sequence[int] | None,
        *,
        eager: bool,
    ) -> tuple[Any, StepMode]:
        """One call of the schedule: its result, and how it ran."""
        forward_only = bool(kwargs.get("forward_only", False))
        with (
            self._abandoning(forward_only=forward_only),
            self.engine.step(
                kwargs["num_microbatches"],
                forward_only=forward_only,
                shape_key=shape_key,
                eager=eager,
                misfit=told,
                banks=keys,
                plan_digest=digest_of_plan(keys),
            ) as mode,
            self._groups_put_back(mode),
        ):
            if self._experts is not None and not forward_only:
                self._experts.forget_abandoned()
            if self._experts is not None and mode is StepMode.REPLAY:
                self._experts.begin_replays()
            with self._stashing(mode, forward_only=forward_only):
                if not forward_only and (self._experts is not None or self.stash is not None):
                    kwargs = telling_last_forward(
                        kwargs,
                        len(self._parts),
                        partial(self._end_forwards, mode),
                        self._resume_forwards,
                    )
                given = self.receiver.begin_step(mode, forward_backward, kwargs, rows)
                result = forward_backward(**given)
        if self._experts is not None and not forward_only:
            self._experts.end_step()
        return result, mode

    @contextmanager
    def _abandoning(self, *, forward_only: bool) -> Iterator[None]:
        """Around a step: one that fails, be it in what follows its schedule, is nobody's."""
        try:
            yield
        except BaseException:
            if self._experts is not None and not forward_only:
                self._experts.abandon_step()
            raise

    def _end_forwards(self, mode: StepMode) -> None:
        """What was counted in forwards goes to the host while backwards run."""
        if self._experts is not None:
            self._experts.end_forwards()
        if self.stash is not None and mode is StepMode.REPLAY:
            self.stash.end_forwards()

    def _resume_forwards(self) -> None:
        """There was another forward: what was sent is not the end of it."""
        if self._experts is not None:
            self._experts.resume_forwards()
        if self.stash is not None:
            self.stash.resume_forwards()

    def _groups_put_back(self, mode: StepMode) -> AbstractContextManager[None]:
        if self._held_groups is None:
            return nullcontext()
        return self._held_groups.put_back(is_replayed=mode is StepMode.REPLAY)

    @contextmanager
    def _stashing(self, mode: StepMode, *, forward_only: bool) -> Iterator[None]:
        if self.stash is None or forward_only:
            yield
        elif mode is StepMode.REPLAY:
            self.stash.begin_replays()
            yield
            self.stash.end_replays()
        else:
            with self.stash.eager_step(is_captured=self.engine.report is not None):
                yield

    @property
    def num_banks(self) -> int:
        """Graph pairs of each slot: one for each length, number of sequences and size."""
        if self._contexts is not None:
            return len(self._contexts.banks.keys)
        return 1 if self._packings is None else len(self._packings.buckets.banks)

    @property
    def context_banks(self) -> tuple[ContextBank, ...]:
        """Those of each context-parallel size that is captured; empty where the size is fixed."""
        return () if self._contexts is None else self._contexts.banks.keys

    @property
    def buckets(self) -> Mapping[int, PackedShape]:
        """By its rows, each shape that is captured, largest first; empty without packing.

        Each with the most sequences; `packed_shapes` has those with fewer, too.
        """
        return {} if self._packings is None else self._packings.buckets.shapes

    @property
    def replays_of_bank(self) -> dict[str, int]:
        """Forwards replayed so far by bank, as a user knows it; empty where there is one."""
        counts = self.engine.counters.replays_of_bank
        if self._contexts is not None:
            return {str(bank): count for bank, count in counts.items()}
        if self._packings is None or len(self._packings.buckets.banks) == 1:
            return {}
        return {self._packings.buckets.name(bank): count for bank, count in counts.items()}

    @property
    def packed_shapes(self) -> tuple[PackedShape, ...]:
        """Every shape that is captured, largest first; a microbatch gets the smallest that fits."""
        return () if self._packings is None else self._packings.buckets.all_shapes

    def agree_on_buckets(self, packings: Packings) -> list[int]:
        """Rows of each microbatch of a step, the same on all ranks; all of them call it together.

        For ranks that share experts, whose microbatches go through a chunk together.
        """
        if self._packings is None:
            raise ConfigError("There are buckets in chunk graphs attached with `packing`.")
        return self._packings.buckets.choose(packings, self._agree_on_buckets)

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
            contexts: the bank of each microbatch, where attached with ``contexts``.

        Raises:
            SlotError: the next step was announced already, or too early.
            ConfigError: attached without ``packing`` and ``contexts``.
            PackingError: a microbatch without documents, or a document without tokens.
        """
        self._refuse_unknown(packings, buckets, contexts, misfit)
        if self.guard is not None and self.engine.mode is not StepMode.OUTSIDE:
            raise SlotError(
                "The next step was announced while one runs that may be run anew (stash, or "
                "token_drops='rerun'). Announce it after that one."
            )
        if self._contexts is not None:
            told = self._contexts.announced(contexts, misfit)
            self.engine.announce(told, plan_digest=digest_of_plan(contexts))
            return
        if self._packings is None or packings is None:
            raise ConfigError(
                "Steps are announced to chunk graphs attached with `packing` or `contexts`, and "
                "with packings=... or contexts=..."
            )
        self.engine.announce(self._packings.announced(packings, misfit, buckets))

    def withdraw(self) -> None:
        """Take back the announcement of the next training step, if there is one.

        For a loop that finds, behind `announce`, that another step comes. Call it between the same
        two steps on all ranks, those too that announced nothing, or on none. The step is then told
        what it holds when it begins.

        Raises:
            SlotError: a step is running.
            ConfigError: attached without ``packing`` and ``contexts``.
        """
        of_step = self._packings if self._contexts is None else self._contexts
        if of_step is None:
            raise ConfigError(
                "Chunk graphs attached without `packing` and `contexts` are announced no steps."
            )
        self.engine.withdraw()
        of_step.withdraw()

    def name_replays(self) -> None:
        """Name every replay in profiles by stage, chunk, action and microbatch."""
        self.engine.name_replays(self._names)

    def release(self) -> None:
        """Drop graphs and their memory; the model stays attached, eager until captured again."""
        self.engine.release()
        if self.stash is not None:
            self.stash.release()
        for memory in self._held:
            memory.release()

    def detach(self) -> None:
        """Release the graphs and give every module its own forward back.

        Whatever goes wrong in one of the two, the other is done. Detaching again does nothing.
        ``torch.distributed.destroy_process_group()`` detaches first what still is attached: it
        would wait for ever for graphs that hold collectives.
        """
        try:
            with ExitStack() as stack:  # from the last to the first
                for agree in (self._agree, self._agree_on_buckets):
                    if agree is not None:
                        stack.callback(agree.close)
                if self.guard is not None:
                    stack.callback(self.guard.close)
                if self._experts is not None:
                    stack.callback(self._experts.detach)
                if self.stash is not None:
                    stack.callback(self.stash.detach)
                for part in self._parts:
                    stack.callback(part.restore)
                stack.callback(self.release)
        finally:
            if self.engine.report is None:  # else groups would still wait for the graphs
                self._forget_groups()


def _refuse_other_length(kwargs: Mapping[str, Any]) -> None:
    """Refuse a length of the decoder that is not what stages send each other."""
    length, decoder = kwargs.get("seq_length"), kwargs.get("decoder_seq_length")
    if decoder is None or decoder == length or kwargs.get("forward_only", False):
        return
    raise ConfigError(
        f"The schedule was given decoder_seq_length {decoder}, by which Megatron's pipeline "
        f"stages receive, and packed microbatches have {length} rows. Leave it out (a script's "
        "--decoder-seq-length): it is for models with an encoder."
    )
