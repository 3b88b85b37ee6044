"""`GraphedSchedule`: torch's schedules for any number of microbatches, on one capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph import __version__
from chunkgraph._text import shown
from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.engine.agreement import (
    Maximum,
    new_group,
    refuse_differences,
    refused_together,
)
from chunkgraph.engine.chunk import is_integer
from chunkgraph.engine.split import WeightBackwards
from chunkgraph.errors import (
    ChunkGraphError,
    ConfigError,
    ReplayMismatchError,
    refuse_deepcopy,
)
from chunkgraph.pipelining.data_parallel import refuse_too_few_steps
from chunkgraph.pipelining.slots import ScheduleSlots, actions_of, slots_of
from chunkgraph.pipelining.stage import ReceiveMemory, StageReplays, graphed
from chunkgraph.schedules import Schedule
from chunkgraph.slots import RankSchedule

_OTHER_SHAPES = (
    "A GraphedSchedule takes no shape_key, and its stages receive one shape, in eager steps too. "
    "Drop a short last batch, or create a second GraphedSchedule for the other shape, with its own "
    "stages on the same modules."
)


class GraphedSchedule:
    """Run a schedule of torch for any number of microbatches, on captured stages.

    All ranks of the pipeline create it together, and call `step` and `eval` together. The first
    ``options.num_warmup_steps`` steps run eagerly. Then the stages are captured, with enough slots
    for the schedule of every declared count, and all later steps replay.

    Args:
        stages: The rank's stages: one or several `GraphedStage` or `PipelineStage` objects; the
            latter become graphed ones.
        make: Function that creates the schedule of these stages for a number of microbatches.
        counts: The numbers of microbatches that steps may have.
        options: See `CaptureOptions`.
        **settings: Further arguments of `ChunkGraphs`.

    Raises:
        ConfigError: A stage cannot be captured, or an argument is invalid.

    Attributes:
        graphs: The rank's chunk graphs.
        slots: The slots of the pipeline.
        receive_memory: Memory of the receives in replayed steps.
        sleep: See `ChunkGraphs.sleep`.
        wake: See `ChunkGraphs.wake`.

    Example::

        stage = GraphedStage(module, rank, num_ranks, device)
        schedules = GraphedSchedule(
            stage, lambda n: Schedule1F1B(stage, n, loss_fn=loss_fn), counts=(4, 8)
        )
        schedules.step(x, target=y, num_microbatches=8)
    """

    __deepcopy__ = refuse_deepcopy

    def __init__(
        self,
        stages: Any,
        make: Callable[[int], Any],
        counts: Sequence[int] = (),
        *,
        options: CaptureOptions | None = None,
        **settings: Any,
    ) -> None:
        given = list(stages) if isinstance(stages, Sequence) else [stages]
        self._make = make
        self._is_training: bool | None = None
        self._kept: dict[int, Any] = {}  # schedules by count
        self.receive_memory = ReceiveMemory()
        self._agree = _agree_in(getattr(given[0], "group", None) if given else None)
        options, rank = options or CaptureOptions(), dist.get_rank()
        with refused_together(self._agree, rank):
            self._stages = [graphed(stage) for stage in given]
            self._counts = _checked(counts)
            self._fitting = set(self._counts)
            self.slots = reduce(or_, map(self._plan, self._counts), ScheduleSlots())
            self._replays = [
                StageReplays(stage, self.receive_memory, is_split=self.slots.is_split)
                for stage in self._stages
            ]
            self.graphs = self._new_graphs(options, settings)
        self.sleep, self.wake = self.graphs.sleep, self.graphs.wake
        equal = {
            "chunkgraph": __version__,
            "torch": torch.__version__,
            "counts": self._counts,
            "schedule": type(self._kept[self._counts[0]]).__name__,
            "num_warmup_steps": options.num_warmup_steps,
            "on_failure": options.on_failure,
            "on_moved_memory": options.on_moved_memory,
        }
        refuse_differences(self._agree, rank, equal)

    @property
    def is_asleep(self) -> bool:
        """Return whether the graphs sleep."""
        return self.graphs.is_asleep

    def step(
        self, *args: Any, num_microbatches: int | None = None, eager: bool = False, **kwargs: Any
    ) -> torch.Tensor | Any:
        """Run one training step; see ``step`` of torch's schedules.

        Args:
            *args: Positional arguments of the model, on the first rank.
            num_microbatches: Number of microbatches; optional if only one count is declared.
            eager: Run the step without graphs; the same on all ranks.
            **kwargs: Keyword arguments of the model and of the schedule's ``step``: ``target``,
                ``losses``, ``return_outputs``, and so on.

        Returns:
            The result of the schedule's ``step``.

        Raises:
            ConfigError: The count is missing or invalid, or needs more slots than were planned.
            ReplayMismatchError: A microbatch does not match the capture.
            CaptureError: A stage could not be captured.
        """
        count = self._count(num_microbatches)
        self._check_slots(count)
        schedule = self._schedule(count, is_training=True)
        with ExitStack() as stack:
            for own in self._replays:
                stack.enter_context(own.step())
            with self.graphs.step(count, eager=eager), _own_errors():
                with self._renewed_after_errors():
                    result = schedule.step(*args, **kwargs)
                for own in self._replays:
                    own.hold_parameters()
        return result

    def eval(self, *args: Any, num_microbatches: int | None = None, **kwargs: Any) -> Any:
        """Run one evaluation step, for any count; see ``eval`` of torch's schedules.

        With gradients disabled it replays forward graphs, after a first such step. With stages in
        wrappers for data parallelism it runs eagerly.
        """
        count = self._count(num_microbatches)
        schedule = self._schedule(count, is_training=False)
        with (
            self.graphs.step(count, forward_only=True),
            _own_errors(),
            self._renewed_after_errors(),
        ):
            return schedule.eval(*args, **kwargs)

    def _count(self, num_microbatches: int | None) -> int:
        """Return the number of microbatches of a step or an evaluation."""
        if num_microbatches is None:
            if len(self._counts) > 1:
                raise ConfigError(
                    f"Steps may have {_listed(self._counts)} microbatches. Pass the number of "
                    "this step: num_microbatches=..."
                )
            return self._counts[0]
        if not is_integer(num_microbatches) or num_microbatches < 1:
            raise ConfigError(
                f"num_microbatches is {shown(num_microbatches)}; pass a whole number, 1 or greater."
            )
        return num_microbatches

    def _check_slots(self, count: int) -> None:
        """Check that the schedule for a count fits the slots."""
        if count in self._fitting:
            return
        if self._plan(count) | self.slots != self.slots:
            del self._kept[count]
            raise ConfigError(
                f"{count} microbatches need more slots, or other backwards, than the declared "
                f"{_listed(self._counts)}. Declare all counts that steps may have: "
                f"counts=(..., {count})."
            )
        self._fitting.add(count)

    def _plan(self, count: int) -> ScheduleSlots:
        """Create the schedule for a count, and return its slots."""
        schedule = self._new(count)
        self._kept[count] = schedule
        return slots_of(schedule, self._stages[0].num_stages, count)

    def _actions(self, count: int) -> Schedule:
        """Return the actions of all ranks in a training step, by which pages are planned."""
        schedule = self._kept.get(count)
        first = self._stages[0]
        num_ranks = first.num_stages // len(self._stages)
        return actions_of(schedule or self._new(count), num_ranks, count)

    def _new(self, count: int) -> Any:
        """Create the schedule for a count; check that it has that count and the captured stages."""
        if not callable(self._make):
            raise ConfigError(
                f"make is {shown(self._make)}. Pass a function that creates a schedule, such as "
                "lambda n: Schedule1F1B(stage, n, loss_fn=loss_fn)."
            )
        schedule = self._make(count)
        actual = getattr(schedule, "_n_microbatches", count)
        is_missing = schedule is None or isinstance(schedule, type)
        if is_missing or actual != count:
            what = shown(schedule) if is_missing else f"a schedule of {actual} microbatches"
            raise ConfigError(
                f"make({count}) returned {what}. Let it return a schedule of {count} microbatches, "
                f"such as Schedule1F1B(stage, {count}, loss_fn=loss_fn)."
            )
        for stage in getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]:
            if stage is not None and stage not in self._stages:
                raise ConfigError(
                    f"The schedule for {count} microbatches runs stage {stage.stage_index} as an "
                    "object that was not passed to GraphedSchedule and would not be captured. Pass "
                    "all stages of the rank, and let make create schedules of the same objects."
                )
        return schedule

    def _schedule(self, count: int, *, is_training: bool) -> Any:
        """Return the schedule for a count, a new one after a change of kind or a failed run.

        Torch sets up a stage's receive buffers when a schedule object first runs. Not every release
        sets them up again when the object changes between training and evaluation. The buffers
        belong to the stage, so a change with one object can leave those of another out of date.
        """
        if self._is_training not in (None, is_training):
            self._kept.clear()
        self._is_training = is_training
        if count not in self._kept:
            self._kept[count] = self._new(count)
        for stage, own in zip(self._stages, self._replays, strict=True):
            own.take_stage()
            stage.chunks = max(self._kept)  # another schedule may have lowered it
        return self._kept[count]

    @contextmanager
    def _renewed_after_errors(self) -> Iterator[None]:
        """Drop all schedules if a run raises: it leaves its losses and counts in the object."""
        try:
            yield
        except BaseException:
            self._kept.clear()
            raise

    def _new_graphs(self, options: CaptureOptions, settings: dict[str, Any]) -> ChunkGraphs:
        first = self._stages[0]
        if self.slots.is_split and any(own.is_wrapped for own in self._replays):
            raise ConfigError(
                "The schedule splits backwards, and a stage is in DistributedDataParallel, which "
                "reduces gradients at the end of a whole backward; torch never reduces those of a "
                "split one. Use a schedule of whole backwards, or reduce the gradients after the "
                "step."
            )
        for stage in self._stages:
            refuse_too_few_steps(stage.submod, options)
        num_together = self.slots.of_rank[first.group_rank]
        of_stages = [self.slots.of_stage[stage.stage_index] for stage in self._stages]
        graphs = ChunkGraphs(
            [own.chunk for own in self._replays],
            num_together if options.shared_slots else of_stages,
            num_together=num_together,
            options=options,
            agree=self._agree,
            schedule=RankSchedule(self._actions, first.group_rank) if options.has_pages else None,
            **settings,
        )
        weights = WeightBackwards(graphs)
        for index, own in enumerate(self._replays):
            own.join(graphs, weights, index)
            if not own.is_plain:
                graphs.forward_only.why_not = "a wrapper belongs to the stage"
        return graphs


def _checked(counts: object) -> tuple[int, ...]:
    """Return the counts without duplicates.

    Raises:
        ConfigError: The counts are missing or invalid.
    """
    if not isinstance(counts, Sequence) or not counts:
        raise ConfigError(f"counts is {shown(counts)}; pass the numbers of microbatches of steps.")
    for count in counts:
        if not is_integer(count) or count < 1:
            raise ConfigError(f"counts has {shown(count)}; pass whole numbers, 1 or greater.")
    return tuple(dict.fromkeys(counts))


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts[:-1])) + " or " * (len(counts) > 1) + str(counts[-1])


def _agree_in(group: dist.ProcessGroup | None) -> Maximum | None:
    """Create the agreement of a pipeline's ranks, None for one rank. All ranks call it together."""
    if dist.get_world_size(group) == 1:
        return None
    ranks = dist.get_process_group_ranks(group)
    # Only the ranks of this pipeline call this. But if they are all, torch's name of the group must
    # not depend on how many groups a rank is in, such as those of tied embeddings.
    is_part = len(ranks) < dist.get_world_size()
    return Maximum(new_group(ranks, backend="gloo", use_local_synchronization=is_part))


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise errors of the graphs unwrapped: torch's stages wrap errors into others."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while not (cause is None or isinstance(cause, ChunkGraphError)):
            cause = cause.__cause__
        if cause is None or isinstance(error, ChunkGraphError):
            raise
        if isinstance(cause, ReplayMismatchError) and "shape_key" in str(cause):
            cause.add_note(_OTHER_SHAPES)
        raise cause from None
