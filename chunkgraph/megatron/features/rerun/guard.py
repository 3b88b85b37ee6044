"""Steps in which the stash or an expert had no room are run anew, before anyone uses their result.

The flags stay on the device while a step runs. When its schedule is over they are read as they were
behind the last forward, so that the device still runs backwards meanwhile, and all ranks agree on
them on the host. Where one had no room, gradients, random state, buffers and metrics are put back
on all ranks, and the step runs once more, eagerly, from the same inputs. Then there is more room,
and graphs are captured anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from chunkgraph.engine.counters import Counters
from chunkgraph.engine.decide.reasons import Agree, StepMode, agree_alone
from chunkgraph.megatron.feature import Feature, Features
from chunkgraph.megatron.features.rerun.rewind import RewindableInputs, StepState
from chunkgraph.megatron.site import new_agreement
from chunkgraph.megatron.step import Shortage
from chunkgraph.memory.stash import StashOptions

if TYPE_CHECKING:
    from chunkgraph.megatron.attached import MegatronChunkGraphs

__all__ = ["OverflowGuard", "RunStep"]

_log = logging.getLogger(__name__)

RunStep = Callable[[dict[str, Any], bool], tuple[Any, StepMode]]
"""Runs the schedule with these keywords, eagerly if asked to; its result, and how it ran."""


class OverflowGuard:
    """Runs the training steps of one rank; all ranks have one, with or without experts.

    A step must begin without gradients, as Megatron's does.

    Args:
        state: what a step changes.
        features: what finds no room.
        agree: see `Agree`.
        release: drops the graphs, so that they are captured again.
        has_graphs: whether there are any.
        counters: counts what happens.
        max_recaptures: how many times that may be.
        rank: names this rank in the log.
    """

    def __init__(
        self,
        state: StepState,
        features: Features,
        *,
        agree: Agree | None,
        release: Callable[[], None],
        has_graphs: Callable[[], bool],
        counters: Counters,
        max_recaptures: int,
        rank: int,
    ) -> None:
        self._state = state
        self._features = features
        self._agree = agree or agree_alone
        self._release = release
        self._has_graphs = has_graphs
        self._counters = counters
        self._max_recaptures = max_recaptures
        self._rank = rank

    @classmethod
    def of(cls, graphs: MegatronChunkGraphs, undo: ExitStack) -> OverflowGuard:
        """Make the guard of a rank's graphs; all ranks call it together."""
        site, engine = graphs.site, graphs.engine
        return cls(
            StepState(site.chunks, graphs.features.tensors),
            graphs.features,
            agree=new_agreement(undo),  # the engine's is asked ahead of steps
            release=graphs.release,
            has_graphs=lambda: engine.report is not None,
            counters=engine.counters,
            max_recaptures=(site.stash or StashOptions()).max_recaptures,
            rank=site.place.rank,
        )

    def run(self, step: RunStep, kwargs: dict[str, Any]) -> Any:
        """Run one training step; see the module's text.

        Args:
            step: runs it.
            kwargs: of the schedule.

        Returns:
            What the schedule returns, of the run in which all had room.

        Raises:
            StashError: pages ran out, and that was to be an error.
        """
        inputs = RewindableInputs(kwargs["data_iterator"])
        kwargs = {**kwargs, "data_iterator": inputs.given}
        self._state.keep()
        try:
            result, mode = step(kwargs, False)
        except BaseException:
            self._features.drop_step()
            raise
        short = self._look(mode)
        if not short:
            return result
        del result  # it may be memory of graphs
        inputs.rewind()
        self._state.restore()
        return self._run_again(step, kwargs, mode, short)

    def _look(self, mode: StepMode) -> list[tuple[Feature, Shortage]]:
        """Return the features that had no room on any rank, with the most of all ranks."""
        shortages = self._features.shortages(mode)
        if not shortages:
            return []
        numbers = iter(self._agree([n for _, mine in shortages for n in mine.numbers]))
        short, texts = [], []
        for feature, mine in shortages:
            amount, is_at_limit, *late = (next(numbers) for _ in mine.numbers)
            most = Shortage(mine.name, amount, "", bool(is_at_limit), tuple(late))
            feature.answer(mine, most)
            if most.amount:
                short.append((feature, most))
                self._counters.overflow_reruns[mine.name] += 1
            if mine.amount:
                texts.append(mine.text)
        if texts or (short and self._rank == 0):
            text = " and ".join(texts) or "another rank had no room"
            _log.warning("rank %d: the step is run anew eagerly: %s.", self._rank, text)
        return short

    def _run_again(
        self,
        step: RunStep,
        kwargs: dict[str, Any],
        mode: StepMode,
        short: Sequence[tuple[Feature, Shortage]],
    ) -> Any:
        was_captured = mode is StepMode.REPLAY
        if was_captured:
            grows = len(self._counters.recaptures) < self._max_recaptures
        else:  # with more room than the graphs have, eager passes would be others than replays
            grows = not self._has_graphs()
        is_at_limit = any(most.is_at_limit for _, most in short)
        grows = grows and not is_at_limit
        if was_captured and grows:
            self._release()
            why = short[0][1].name
            self._counters.recaptures.append(why)
            if self._rank == 0:
                _log.warning(
                    "graphs are captured anew with more room (%s), %d of at most %d times.",
                    why,
                    len(self._counters.recaptures),
                    self._max_recaptures,
                )
        elif self._rank == 0 and was_captured:
            limit = "memory" if is_at_limit else f"{self._max_recaptures} captures"
            _log.warning("room stays as it is: the limit of %s is reached.", limit)
        with ExitStack() as room:
            for feature, _ in short:
                room.enter_context(feature.having_room())
            # After a release it is one of the steps before the capture, and eager by itself.
            result, mode = step(kwargs, not (was_captured and grows))
        assert mode is StepMode.EAGER
        if grows:  # on all ranks, or on none
            for feature, _ in short:
                feature.make_room(self._agree)
        return result
