"""How many slots each chunk gets: a number, or as many as fit in a limit of memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import mul

from chunkgraph._text import counted, format_bytes, parse_bytes, shown
from chunkgraph.engine.agreement import Agree
from chunkgraph.engine.capture.session import Session
from chunkgraph.engine.chunk import CaptureOptions, Chunk, is_integer
from chunkgraph.engine.paging.pages import PageTrial
from chunkgraph.engine.paging.replayer import PagedReplayer
from chunkgraph.errors import CaptureError, ConfigError
from chunkgraph.graphs import GraphBackend
from chunkgraph.schedules import Schedule
from chunkgraph.slots import PagePlan, RankSchedule, least_slots, plan_pages, split_actions


class SlotLimit:
    """The limit of one rank's slots.

    Args:
        options: The options; ``max_slots`` or ``max_slot_memory`` is set.
        schedule: The schedule of the steps.
        num_chunks: Number of chunks of the rank.

    Raises:
        ConfigError: Options do not go together, or there is no schedule.
    """

    def __init__(
        self, options: CaptureOptions, schedule: RankSchedule | None, num_chunks: int
    ) -> None:
        limit = options.max_slot_memory
        limit = parse_bytes(limit) if isinstance(limit, str) else limit
        if options.max_slot_memory is not None and not (is_integer(limit) and limit > 0):
            raise ConfigError(
                f"max_slot_memory is {shown(options.max_slot_memory)}; write it as 20GiB or 20GB, "
                "or as a number of bytes."
            )
        names = "max_slots", "max_slot_memory", "shared_slots"
        name, *others = filter(partial(getattr, options), names)
        if others:
            raise ConfigError(
                f"{name} cannot be combined with {others[0]}: pages move between the slots of one "
                "chunk, by one limit. Leave one of them out."
            )
        if schedule is None:
            raise ConfigError(
                f"{name} needs the schedule of the steps, which says which backward comes next. "
                "Create the graphs by ChunkGraphs.for_schedule, or pass "
                "ChunkGraphs(schedule=RankSchedule(build, rank))."
            )
        self._options, self._schedule, self._limit_bytes = options, schedule, limit
        self._num_chunks = num_chunks
        self._schedules: dict[int, Schedule] = {}
        self._least: tuple[int, ...] = ()  # slots of each chunk in the steps so far

    @staticmethod
    def outliving(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Return the chunks with copies of all that they hand out, which outlive their slots."""
        return tuple(replace(c, copies_outputs=None, keeps_input_grads=True) for c in chunks)

    def check(self, num_microbatches: int | None) -> Schedule:
        """Return the schedule of a training step; all ranks call this with the same number.

        Raises:
            ConfigError: A chunk of any rank needs more slots than ``max_slots``, the number of
                microbatches is unknown, or the schedule is not that of the rank.
        """
        if num_microbatches is None:
            raise ConfigError(
                "A step of paged slots began without its number of microbatches, on which the plan "
                "of its pages depends. Pass it: step(num_microbatches)."
            )
        if num_microbatches in self._schedules:
            return self._schedules[num_microbatches]
        schedule = split_actions(self._schedule.build(num_microbatches))
        rank, sizes = self._schedule.rank, (schedule.num_chunks, schedule.num_microbatches)
        if sizes != (self._num_chunks, num_microbatches) or rank not in range(schedule.num_ranks):
            raise ConfigError(
                f"Rank {rank} has {counted(self._num_chunks, 'chunk')} and a step of "
                f"{num_microbatches} microbatches, but its RankSchedule built {schedule.name!r} of "
                f"{sizes[0]} chunks and {sizes[1]} microbatches for ranks 0 to "
                f"{schedule.num_ranks - 1}. Pass RankSchedule(build, rank) with the rank in its "
                "pipeline and such a schedule."
            )
        most = [self._options.max_slots] * schedule.num_chunks
        needed = [least_slots(schedule, rank, most) for rank in range(schedule.num_ranks)]
        own = needed[rank]
        self._least = tuple(map(max, own, self._least or own))
        self._schedules[num_microbatches] = schedule
        return schedule

    def begin(self, session: Session) -> PageTrial:
        """Begin the trial of a capture session whose eager passes have been measured.

        Raises:
            CaptureError: The memory is too little.
        """
        full, limit_bytes = session.num_slots, self._limit_bytes
        least = tuple(map(min, self._least, full))  # one for a chunk without a backward
        of_chunk = zip(*session.warm_ups.values(), strict=True)
        slot_bytes = [max(max(w.slot_bytes, w.held_bytes) for w in warm) for warm in of_chunk]
        for cap in range(self._options.max_slots or max(full), 0, -1):
            counts = tuple(min(count, cap) for count in full)
            is_enough = all(map(int.__ge__, counts, least))
            num_bytes = sum(map(mul, counts, slot_bytes))
            if limit_bytes is None or (is_enough and num_bytes <= limit_bytes):
                return PageTrial(session, counts)
        raise CaptureError(
            f"max_slot_memory={self._options.max_slot_memory} is too little: the schedule needs at "
            f"least {list(least)} slots of the chunks, of "
            f"{', '.join(map(format_bytes, slot_bytes))} each."
        )

    def replayer(self, backend: GraphBackend, agree: Agree) -> Callable[..., PagedReplayer]:
        """Return the class that replays under this limit, with its first arguments."""
        own = self._schedule

        def plans(num_slots: Sequence[int | None]) -> Callable[[int | None], PagePlan]:
            (num_ranks,) = agree([own.rank + 1])
            every = [[sys.maxsize] * len(num_slots) for _ in range(num_ranks)]
            every[own.rank] = [count or sys.maxsize for count in num_slots]
            negated = agree([-count for counts in every for count in counts])  # of the fewest
            agreed = (None if n == -sys.maxsize else -n for n in negated)
            fewest = [[next(agreed) for _ in counts] for counts in every]

            @cache
            def plan(num_microbatches: int | None) -> PagePlan:
                schedule = self.check(num_microbatches)
                for rank, counts in enumerate(fewest):  # too few on one are an error on all
                    least_slots(schedule, rank, counts)
                return plan_pages(schedule, own.rank, num_slots, own.costs)

            return plan

        return partial(PagedReplayer, plans=plans, backend=backend)
