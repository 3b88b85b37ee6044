"""`ChunkGraphs`: the graphs of one rank, called like the modules that they replace."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from chunkgraph.engine import arguments
from chunkgraph.engine.agreement import Agree, Agreement, agree_alone, lost_ranks_named
from chunkgraph.engine.banks import Banks, Samples, StepBanks
from chunkgraph.engine.capture.graph_set import CaptureReport, GraphSet
from chunkgraph.engine.capture.output_gradients import watched
from chunkgraph.engine.capture.session import SessionSettings
from chunkgraph.engine.checks import MOVED
from chunkgraph.engine.chunk import CaptureOptions, Chunk, Host
from chunkgraph.engine.decide import StepDecider
from chunkgraph.engine.forward_only import ForwardOnlySteps
from chunkgraph.engine.hang import hang_watches
from chunkgraph.engine.joint_capture import Capturer
from chunkgraph.engine.memory_group import MemoryGroup
from chunkgraph.engine.observer import (
    ChunkHooks,
    Counters,
    GradientMarkers,
    Observer,
    ReplayCounters,
)
from chunkgraph.engine.replay import Replayer
from chunkgraph.engine.step import SHAPE_UNKNOWN, EagerReason, StepMode, StepPlan, StepRequest
from chunkgraph.engine.tree import Call
from chunkgraph.errors import CaptureError, ConfigError, SlotError, refuse_deepcopy
from chunkgraph.graphs import GraphBackend
from chunkgraph.optimizer import CapturedOptimizer
from chunkgraph.slots import RankSchedule, plan_slots

_SAMPLED = (
    EagerReason.CAPTURE_WARMUP,
    EagerReason.RELEASED,
    EagerReason.MEMORY_REPLACED,
    EagerReason.FORWARD_ONLY,
)


class ChunkGraphs:
    """Capture the model chunks of one rank and replay them inside steps.

    Call ``callables[c]`` where the schedule called chunk ``c``, inside ``with graphs.step(...)``.
    The first ``num_warmup_steps`` steps run eagerly. A step boundary then captures all slots; later
    steps replay them for any number of microbatches. `capture` captures now, from sample inputs.

    Args:
        chunks: this rank's modules or `Chunk` values, by model chunk index; or a single one.
        num_slots: for each chunk, or one number for all, the most microbatches it ever has in
            flight (see `for_schedule`); with ``options.shared_slots`` the most of all together.
        num_together: the most in flight in all chunks; if set, they share slots where that saves.
        options: see `CaptureOptions`.
        backend: makes the graphs; None: CUDA graphs or the CPU recorder, by the parameters' device.
        agree: lets all ranks decide together; see `Agree`. Required with several processes.
        host: the training loop around the chunks; see `Host`.
        banks: the variants of every slot; see `Banks`. None: a single one.
        schedule: that of every training step, which paged slots need (``options.max_slots``).
        shares_memory_with: an engine whose steps never overlap with those of this one, such as that
            of a reference model: slots and scratch of both lie in the same memory. It makes the
            graphs with its ``backend``.
        takes_misfits: whether every training step states on every rank whether its inputs fit
            (`step`, `announce`); the same on all ranks. ``banks.drops_failed`` needs it.

    Raises:
        ConfigError: an argument is invalid.

    Attributes:
        chunks: the chunks of the rank.
        backend: makes the graphs.
        callables: a function for each chunk, called like the chunk.
        waiting: see `Replayer.waiting`.
        run_waiting: see `Replayer.run_waiting`.
        reserve_input: see `Replayer.reserve_input`.
        reserve_output_grad: see `Replayer.reserve_output_grad`.
        counters: see `Counters`.
        failure: error of the last capture session, or None.
        mode: how the callables run now.
        forward_only: the graphs of forward-only steps.
        memory: the memory of the graphs; see `MemoryGroup`.
        recaptures: whether memory that moves costs a capture.
    """

    __deepcopy__ = refuse_deepcopy

    def __init__(
        self,
        chunks: nn.Module | Chunk | Sequence[nn.Module | Chunk],
        num_slots: int | Sequence[int],
        *,  # many, since a slot's memory and the agreement of ranks belong to the engine
        num_together: int | None = None,
        options: CaptureOptions | None = None,
        backend: GraphBackend | None = None,
        agree: Agree | None = None,
        host: Host | None = None,
        banks: Banks | None = None,
        takes_misfits: bool = False,
        schedule: RankSchedule | None = None,
        shares_memory_with: ChunkGraphs | None = None,
    ) -> None:
        self.options = options or CaptureOptions()
        self.chunks = arguments.as_chunks(chunks)
        self._limit: Any = None
        if self.options.has_pages:  # loaded only if it is needed
            make = resolve_name("chunkgraph.engine.paging.limits:SlotLimit")
            self._limit = make(self.options, schedule, len(self.chunks))
            self.chunks = self._limit.outliving(self.chunks)
        self._num_slots = arguments.check_counts(len(self.chunks), num_slots)
        self._num_together = num_together
        self.counters = Counters()
        if shares_memory_with is None:
            backend = backend or arguments.default_backend(self.chunks, self.options)
            self.memory = MemoryGroup(backend)
        else:
            self.memory = shares_memory_with.memory
        self.backend = self.memory.backend
        self._agreement, self._host = Agreement(agree or agree_alone), host or Host()
        self._optimizers: list[CapturedOptimizer] = []
        self._of_banks = banks or Banks()
        if self._of_banks.drops_failed and not takes_misfits:
            raise ConfigError(
                "Banks(drops_failed=True) needs steps with misfits. Pass ChunkGraphs "
                "takes_misfits=True too, or leave out drops_failed."
            )
        labels = [chunk.label for chunk in self.chunks]
        self._observers: list[Observer] = [*hang_watches(self.backend.device, labels)]
        self._is_replaced: Callable[[], bool] = lambda: False
        self._release_replaced: Callable[[], None] = self.release
        self.recaptures = self.options.on_moved_memory == "recapture"
        self._decider = StepDecider(
            self._agreement,
            self._state,
            takes_misfits=takes_misfits,
            asks_ahead=not self.recaptures,
        )
        self._is_training = True
        self._begin()
        self.forward_only = ForwardOnlySteps(
            self._for_forwards,
            self.chunks,
            self.counters,
            needs_banks=len(self._of_banks.keys) > 1,
        )
        self.memory.join(self)
        self.callables = tuple(partial(self._call, c) for c in range(len(self.chunks)))
        self.waiting, self.run_waiting = self._replayer.waiting, self._replayer.run_waiting
        self.reserve_input = self._replayer.reserve_input
        self.reserve_output_grad = self._replayer.reserve_output_grad

    def _begin(self) -> None:
        """Begin without graphs."""
        self.mode = StepMode.OUTSIDE
        self.failure: CaptureError | None = None
        self._captured: GraphSet | None = None
        self._captured_shape_key: Hashable = SHAPE_UNKNOWN
        self._calls_again: Mapping[Hashable, Sequence[Call]] | None = None
        self._was_released = False
        self._was_replaced = False  # as of the end of the last step
        self._banks = StepBanks(self._of_banks, len(self.chunks))
        count, limit, agree = self.options.num_warmup_steps, self._limit, self._agreement.now
        takes_memory = limit is None and self.options.verify == "none"
        self._samples = Samples(self._banks, self.chunks, count, warns=self._is_training)
        self._replayer = (Replayer if limit is None else limit.replayer(self.backend, agree))(
            self.chunks,
            self._num_slots,
            self._banks,
            self.counters,
            self.backend.device,
            shared_slots=self.options.shared_slots,
        )
        self._capturer = Capturer(
            chunks=self.chunks,
            num_slots=self._num_slots,
            settings=SessionSettings(
                has_scratch=self._is_training and sum(self._num_slots) > 1,
                shared_slots=self.options.shared_slots,
                num_together=self._num_together if limit is None else None,
                limit=limit.begin if limit is not None else None,
                host=self._host,
                others=self.memory.sets if takes_memory else tuple,
            ),
            backend=self.backend,
            options=self.options,
            banks=self._banks,
            agree=agree,
        )
        self._hooks = ChunkHooks(self.chunks)
        self._of_capture: tuple[Observer, ...] = ()

    def _for_forwards(self, chunks: Sequence[Chunk], counters: Counters) -> ChunkGraphs:
        """Return an engine for forward-only steps of one kind; see `ForwardOnlySteps`.

        It shares this one's agreement, observers and idle pools.
        """
        graphs = copy(self)
        graphs.chunks, graphs._num_slots = tuple(chunks), (1,) * len(chunks)
        graphs.options = replace(
            self.options, num_warmup_steps=1, shared_slots=True, on_failure="eager"
        )
        graphs.counters, graphs._is_training, graphs._limit = counters, False, None
        graphs._is_replaced = lambda: False
        graphs._decider = StepDecider(
            self._agreement, graphs._state, takes_misfits=True, is_training=False, asks_ahead=False
        )
        graphs._begin()
        return graphs

    @classmethod
    def for_schedule(
        cls,
        schedule: str,
        chunks: nn.Module | Chunk | Sequence[nn.Module | Chunk],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        group_size: int | None = None,
        max_num_microbatches: int | None = None,
        **settings: Any,
    ) -> ChunkGraphs:
        """Create the graphs of a pipeline rank with as many slots as its schedule needs.

        Args:
            schedule: a name in `chunkgraph.schedules.list_schedules`, or ``auto`` for the one
                Megatron would run.
            chunks: the chunks of this rank.
            rank: rank in the pipeline, from 0.
            num_ranks: number of ranks of the pipeline.
            group_size: see `chunkgraph.slots.plan_slots`.
            max_num_microbatches: see `chunkgraph.slots.plan_slots`.
            settings: further arguments of `ChunkGraphs`.

        Raises:
            ConfigError: the schedule is unknown, or the sizes form no pipeline.
        """
        rank_chunks = arguments.as_chunks(chunks)
        plan = plan_slots(
            num_ranks,
            len(rank_chunks),
            group_size,
            rank=rank,
            schedule=schedule,
            max_num_microbatches=max_num_microbatches,
        )
        settings["schedule"] = RankSchedule.of(plan)
        are_shared = (settings.get("options") or CaptureOptions()).shared_slots
        num_slots = plan.peak_in_flight if are_shared else plan.slots_per_chunk
        return cls(rank_chunks, num_slots, **settings)

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{chunk.label} with {count} slot{'s' * (count > 1)}"
            for chunk, count in zip(self.chunks, self._num_slots, strict=True)
        )
        state = "capture failed" if self.failure else f"captured: {self._captured is not None}"
        return f"<ChunkGraphs of {parts}; {state}; {self.counters}>"

    @property
    def report(self) -> CaptureReport | None:
        """Return the report of the last capture session; None before it and after `release`."""
        return self._captured.report if self._captured else None

    # -- steps ---------------------------------------------------------------------------------

    @contextmanager
    def step(
        self,
        num_microbatches: int | None = None,
        *,
        forward_only: bool = False,
        shape_key: Hashable = None,
        eager: bool = False,
        plan: StepPlan | None = None,
    ) -> Iterator[StepMode]:
        """Enclose one call of the schedule. All ranks enter it together.

        On entry all ranks agree whether to capture (after warmup) and whether this step is replayed
        or runs eagerly; nothing in the step changes that.

        Args:
            num_microbatches: microbatches of the step. Banks and paged slots need it.
            forward_only: whether this is an evaluation step, in which calls without gradients
                replay graphs of their own (`ForwardOnlySteps`); named as in Megatron. Training
                steps replay chunks with the program `FORWARD_ONLY`.
            shape_key: values that determine the input shapes, for example (sequence length,
                microbatch size). A step with another key than the captured one runs eagerly.
            eager: run the step eagerly.
            plan: of the microbatches, with several banks or ``takes_misfits``; see `StepPlan`.

        Yields:
            How the step runs.

        Raises:
            CaptureError: the session failed and ``on_failure`` is ``raise``.
            ConfigError: on all ranks, plans differ between ranks.
            SlotError: a microbatch was forwarded but not run backward when the step ended.
            ReplayMismatchError: a call differs from the captured one.
        """
        self.memory.check_step(self, trains=self._is_training and not forward_only)
        if forward_only:
            evaluation = self.forward_only.step(
                num_microbatches, shape_key, plan or StepPlan(), eager=eager
            )
            with self._ending_step(), evaluation as self.mode:
                yield self.mode
            return
        step = self._decider.resolve(StepRequest(shape_key, eager, plan or StepPlan()))
        if self._limit is not None and not eager:
            self._limit.check(num_microbatches)
        misfit, banks = step.plan.misfit, step.plan.banks
        if not (misfit or eager):
            self._banks.check(banks, num_microbatches)
        self._banks.begin_step(banks)
        reason = self._decide(step)
        counts = {
            EagerReason.PACKING_OVERFLOW: self.counters.packing_overflows,
            EagerReason.BANK_MISSING: self.counters.missing_banks,
        }.get(reason)
        if counts is not None:
            counts[misfit or self.misfit_of(banks or ()) or "on another rank"] += 1
        with self._ending_step(), lost_ranks_named():
            if reason is EagerReason.NONE:
                self.mode = StepMode.REPLAY
                observers = self._hooks, *self._observers, *self._of_capture
                with self._replayer.step(num_microbatches, observers):
                    yield self.mode
            else:
                with self._running_eagerly(reason, shape_key):
                    yield self.mode
        self._decider.end_step(step)

    @contextmanager
    def _ending_step(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.mode = StepMode.OUTSIDE
            self._was_replaced = self._captured is not None and self._is_replaced()

    def announce(self, plan: StepPlan) -> None:
        """Announce whether the inputs of the next training step fit, so that ranks agree early.

        While a step runs, this is the step after it. See `engine.decide`.

        Args:
            plan: why they do not fit, or "", and perhaps a digest; banks are stated by `step`.

        Raises:
            SlotError: that step has been announced already.
        """
        self._decider.announce(plan, is_in_step=self.mode is not StepMode.OUTSIDE)

    def withdraw(self) -> None:
        """Withdraw the announcement of the next training step, if there is one.

        All ranks call it between the same two steps, even if they announced nothing.

        Raises:
            SlotError: a step is running.
        """
        self.memory.refuse_inside("withdraw() was called", self)
        self._decider.withdraw()

    def misfit_of(self, banks: Sequence[Hashable]) -> str:
        """Return the misfit of a step whose microbatches have these banks, if one has no graphs."""
        return self._banks.misfit(banks)

    def _decide(self, step: StepRequest) -> EagerReason:
        """Agree with the other ranks on this step, capturing first if all of them are ready."""
        reason, some_without = self._decider.decide(step)
        if reason is EagerReason.MEMORY_REPLACED:
            self._release_replaced()
        if reason is EagerReason.NONE and some_without:
            self.drop()  # sessions are joint: if some rank has no graphs, all capture
            if self._calls_again is None:
                self._capture_together(self._samples.by_bank, self._samples.shape_key)
            else:
                self._capture_again(self._calls_again)
            if self.failure:
                return EagerReason.CAPTURE_FAILED
            if self._banks.keys != self._banks.all_keys:
                # A bank was dropped on all ranks, but this step may need it on some only.
                misfit = self.misfit_of(step.plan.banks or ())
                (is_missing,) = self._agreement.now([int(bool(misfit))])
                return EagerReason.BANK_MISSING if is_missing else EagerReason.NONE
        return reason

    def _capture_again(self, calls: Mapping[Hashable, Sequence[Call]]) -> None:
        """Capture again from the calls of graphs that were dropped."""
        self.counters.recaptures.append("memory moved, or process groups ended")
        self._capture_together(
            lambda: {key: calls[key] for key in self._banks.keys}, self._captured_shape_key
        )

    def _state(self, shape_key: Hashable) -> tuple[EagerReason, bool]:
        """See `RankState`."""
        has_graphs, reason = self._captured is not None, EagerReason.NONE
        if self.failure is not None:
            reason = EagerReason.CAPTURE_FAILED
        elif self._was_replaced:
            reason = EagerReason.MEMORY_REPLACED
        elif self._captured is not None or self._calls_again is not None:
            if shape_key != self._captured_shape_key:
                reason = EagerReason.SHAPES_DIFFER
            elif self._captured is not None and (self.recaptures or not self._is_training):
                changes = [c for model in self._captured.models if (c := model.change())]
                if self.recaptures and any(c.endswith(MOVED) for c in changes):
                    has_graphs = False
                elif changes and not self._is_training:
                    reason = EagerReason.MODEL_CHANGED
        elif not self._samples.is_ready(shape_key):
            reason = EagerReason.RELEASED if self._was_released else EagerReason.CAPTURE_WARMUP
            reason = reason if self._is_training else EagerReason.FORWARD_ONLY
        return reason, has_graphs

    @contextmanager
    def _running_eagerly(self, reason: EagerReason, shape_key: Hashable) -> Iterator[None]:
        self.mode = StepMode.EAGER
        wants_samples = self._captured is None and reason in _SAMPLED
        observers = [o for o in self._observers if o.observes(None)]
        for observer in observers:
            observer.begin_step(None)
        has_failed = True
        with self._samples.step(shape_key) if wants_samples else nullcontext():
            try:
                yield
                has_failed = False
            finally:
                for observer in observers:
                    observer.end_step(has_failed=has_failed)
        self.mode = StepMode.OUTSIDE
        self.counters.fallbacks[reason.text] += 1
        if wants_samples:
            # Otherwise the optimizer's state lies between workspaces, or in blocks of this step.
            self.backend.release_workspaces()

    def capture(
        self,
        samples: Sequence[Any] | Mapping[Hashable, Sequence[Any]],
        *,
        shape_key: Hashable = None,
    ) -> CaptureReport:
        """Capture now from sample inputs. All ranks call it together, outside a step.

        Args:
            samples: the arguments of each chunk: a tuple of positional arguments, a dict of keyword
                arguments, or a single tensor. Tensors must have the shapes, dtypes, devices and
                ``requires_grad`` of real calls; their values are copied. With several banks, a
                mapping by key.
            shape_key: that of the steps to replay; see `step`.

        Returns:
            The report of the session.

        Raises:
            ConfigError: there is not one sample for each chunk.
            CaptureError: the chunk of this or another rank could not be captured; the callables
                run eagerly.
        """
        self.memory.check_step(self, trains=True, what="capture() was called")
        if self._captured is not None:
            raise CaptureError(
                "The chunks are already captured; call release() before capturing again."
            )
        if self._decider.is_announced:
            raise SlotError("A step is announced; call capture() before announce().")
        calls = arguments.sample_calls(samples, self._banks.keys, len(self.chunks))
        self.failure = None
        self._capture_together(
            lambda: {key: calls[key] for key in self._banks.keys}, shape_key, must_raise=True
        )
        assert self._captured is not None
        return self._captured.report

    def _capture_together(
        self,
        make_samples: Callable[[], Mapping[Hashable, Sequence[Call]]],
        shape_key: Hashable,
        *,
        must_raise: bool = False,
    ) -> None:
        with torch.inference_mode(False):  # a forward-only step may be in that mode
            result = self._capturer.capture(make_samples)
        self._calls_again = None
        self._samples.forget()
        if result.captured is not None:
            last = [chunk.actions[-1] for chunk in self.chunks]
            self._of_capture = (
                *([result.verifier] if result.verifier is not None else ()),
                GradientMarkers(result.captured.markers, last),
                ReplayCounters(self.counters),
            )
            self._replayer.take(result.captured)
            self._captured, self._captured_shape_key = result.captured, shape_key
            self.counters.captures += sum(map(len, result.captured.slots))
            self.counters.capture_sessions += 1
            return
        error = result.error
        assert error is not None
        self.failure = error if isinstance(error, CaptureError) else CaptureError(str(error))
        if must_raise or self.options.on_failure == "raise":
            raise error
        if result.is_cause:
            warnings.warn(f"{error}\nTraining continues eagerly on all ranks.", stacklevel=4)

    def capture_optimizer(
        self, optimizer: torch.optim.Optimizer, **options: Any
    ) -> CapturedOptimizer:
        """Return an object whose ``step`` clips gradients and steps ``optimizer`` as one graph.

        Args:
            optimizer: one of torch's that a graph can hold; see `CapturedOptimizer`.
            options: its ``max_norm`` and ``group``.

        Raises:
            ConfigError: no graph can hold a step of this optimizer.
        """
        options = {"on_failure": self.options.on_failure, **options}
        captured = CapturedOptimizer(optimizer, self.backend, **options)
        self._optimizers.append(captured)
        self.memory.step_graphs[self].append(captured.graph)
        return captured

    def release(self) -> None:
        """Drop graphs, pools and static buffers; steps run eagerly until the next capture.

        All ranks call it between the same steps; warmup begins again. Call it before destroying
        process groups whose collectives are in the graphs; NCCL would wait for these graphs.
        """
        self.memory.refuse_inside("release() was called", self)
        self._was_released |= self.report is not None
        for optimizer in self._optimizers:
            optimizer.release()
        self._was_replaced = False
        self.failure = None
        self._samples.restart()
        self._banks.restore()
        self._calls_again = None
        self._drop()
        self.forward_only.release()

    def drop(self) -> None:
        """Drop graphs and pools, but capture again in the next step, without warmup steps.

        All ranks call it between the same steps.
        """
        if self.is_asleep and not self.recaptures:  # their inputs were not kept
            self.release()
            return
        if self._captured is not None:
            self._calls_again = self._captured.latest_calls()
        self._drop()

    def _drop(self) -> None:
        captured, self._captured = self._captured, None
        self._of_capture = ()
        self._replayer.drop()
        if captured is not None:
            self.backend.synchronize()
            captured.release()
            del captured
            # Otherwise the pools stay reserved, and eager steps cannot use their memory.
            gc.collect()
            self.backend.release_workspaces()

    def sleep(self) -> None:
        """Give the memory of slots, scratch and static inputs back; the graphs stay captured.

        All ranks call it between the same two steps; it waits for the device. Parameters, buffers
        and gradients stay. Until `wake`, no step may begin. Without graphs nothing happens. Graphs
        of captured optimizers sleep too, as do those of engines that share memory with this one.

        Raises:
            ConfigError: the backend was made without ``can_sleep``.
            SlotError: a step is running.
        """
        self.memory.sleep()

    def wake(self) -> None:
        """Get the memory back, at the same addresses. All ranks call it after `sleep`.

        Raises:
            torch.OutOfMemoryError: too little is free; the graphs sleep on. Call `wake` again.
        """
        self.memory.wake(arguments.rank_label(self.chunks))

    @property
    def is_asleep(self) -> bool:
        """Return whether the graphs sleep."""
        return self.memory.is_asleep

    def sets(self) -> list[GraphSet]:
        """Return the graphs of training steps and of forward-only steps, as far as captured."""
        engines = self, *self.forward_only.engines
        return [e._captured for e in engines if e._captured is not None]

    def watch_memory(self, is_replaced: Callable[[], bool], release: Callable[[], None]) -> None:
        """Capture again after a library has replaced, on any rank, memory that graphs use.

        Args:
            is_replaced: called after every step, also a failed one, while there are graphs. If it
                returns True, the next training step is eager on all ranks, and warmup begins again.
            release: called on all ranks before that step; must call `release` and drop everything
                else that lives as long as the graphs.
        """
        self._is_replaced, self._release_replaced = is_replaced, release

    def observe(self, observer: Observer) -> None:
        """Let an observer follow every later step; see `Observer`."""
        self._observers.append(observer)

    def _call(self, c: int, /, *args: Any, **kwargs: Any) -> Any:
        return self.call(c, args, kwargs)

    def call(self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``callables[c](*args, **kwargs)``."""
        evaluating = self.forward_only.current
        if evaluating is not None and evaluating is not self:
            return self.forward_only.call(c, args, kwargs)
        is_replayable = torch.is_grad_enabled() or not self.chunks[c].has_backward
        if self.mode is StepMode.REPLAY and is_replayable:
            return self._replayer.call(c, args, kwargs)
        if torch.is_grad_enabled() and self.mode is StepMode.OUTSIDE:
            raise SlotError(
                f"{self.chunks[c].label} was called outside a step. Call the schedule in `with "
                "graphs.step(n):` (torch's: GraphedSchedule.step); to evaluate, disable gradients."
            )
        backward = self._samples.record(c, args, kwargs) if is_replayable else None
        result = self.call_eagerly(c, args, kwargs)
        if backward is None or not self._is_training:
            return result
        return watched(result, backward)

    def call_eagerly(
        self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_microbatch: bool = False
    ) -> Any:
        """Run the forward of chunk ``c``; ``is_microbatch``: as a microbatch of a replayed step."""
        if is_microbatch:
            self._banks.advance(c)
        result = self.chunks[c].forward(*args, **kwargs)
        for observer in self._observers:
            observer.called(c, result)
        return result
