"""Run a step again if the stash or an expert had no room in it, before its result is used.

The flags stay on the device while a step runs. At the end of the schedule the host reads their
values after the last forward, while the device still runs backwards, and all ranks agree on them.
If any rank had no room, all ranks restore gradients, random state, buffers and metrics, and the
step runs once more, eagerly, from the same inputs. Then the room grows, and graphs are captured
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chunkgraph.engine.counters import Counters
from chunkgraph.engine.decide.reasons import Agree, StepMode, agree_alone
from chunkgraph.megatron.feature import Features, LimitedFeature
from chunkgraph.megatron.features.rerun.rewind import RewindableInputs, StepState
from chunkgraph.megatron.site import new_agreement
from chunkgraph.megatron.step import Shortage

if TYPE_CHECKING:
    from chunkgraph.megatron.attached import MegatronChunkGraphs

__all__ = ["OverflowGuard", "RunStep"]

_log = logging.getLogger(__name__)

RunStep = Callable[[dict[str, Any], bool], tuple[Any, StepMode]]
"""A function of the schedule's keywords, and whether to run eagerly.

It runs the schedule and returns its result and its mode.
"""


class OverflowGuard:
    """Run the training steps of one rank. All ranks have a guard, with or without experts.

    A step must begin without gradients, as Megatron's steps do.

    Args:
        state: Saves and restores what a step changes.
        features: The features, which report shortages.
        agree: See `Agree`.
        release: Frees the graphs, so that they are captured again.
        has_graphs: Returns whether there are graphs.
        counters: Counts repeated steps and recaptures.
        rank: This rank, for the log.
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
        rank: int,
    ) -> None:
        self._state = state
        self._features = features
        self._agree = agree or agree_alone
        self._release = release
        self._has_graphs = has_graphs
        self._counters = counters
        self._rank = rank

    @classmethod
    def of(cls, graphs: MegatronChunkGraphs, undo: ExitStack) -> OverflowGuard:
        """Create the guard of a rank's graphs; all ranks call this together."""
        site, engine = graphs.site, graphs.engine
        return cls(
            StepState(site.chunks, graphs.features.tensors),
            graphs.features,
            agree=new_agreement(undo),  # the engine's agreement runs ahead of steps
            release=graphs.release,
            has_graphs=lambda: engine.report is not None,
            counters=engine.counters,
            rank=site.place.rank,
        )

    def run(self, step: RunStep, kwargs: dict[str, Any]) -> Any:
        """Run one training step, and again if something had no room.

        Args:
            step: Runs the schedule.
            kwargs: Keywords of the schedule.

        Returns:
            The schedule's result in the last run.

        Raises:
            VerifyError: All had room, and a replay is wrong.
        """
        inputs = RewindableInputs(kwargs["data_iterator"])
        kwargs = {**kwargs, "data_iterator": inputs.data_iterator}
        self._state.save()
        try:
            result, mode = step(kwargs, False)
        except BaseException:
            self._features.drop_step()
            raise
        shortages = self._agree_on_shortages(mode)
        if not shortages:
            self._features.raise_judged()
            return result
        del result  # it may alias memory of the graphs
        inputs.rewind()
        self._state.restore()
        return self._run_again(step, kwargs, mode, shortages)

    def _agree_on_shortages(self, mode: StepMode) -> list[tuple[LimitedFeature, Shortage]]:
        """Return the features that had no room on any rank, each with the largest shortage."""
        local_shortages = self._features.shortages(mode)
        if not local_shortages:
            return []
        numbers = iter(self._agree([n for _, local in local_shortages for n in local.numbers]))
        shortages, texts = [], []
        for feature, local in local_shortages:
            amount, is_at_limit = next(numbers), bool(next(numbers))
            largest = replace(local, amount=amount, text="", is_at_limit=is_at_limit)
            if largest.amount:
                shortages.append((feature, largest))
                self._counters.overflow_reruns[local.name] += 1
            if local.amount:
                texts.append(local.text)
        if texts or (shortages and self._rank == 0):
            text = " and ".join(texts) or "another rank had no room"
            _log.warning("rank %d: the step runs again eagerly: %s.", self._rank, text)
        return shortages

    def _run_again(
        self,
        step: RunStep,
        kwargs: dict[str, Any],
        mode: StepMode,
        shortages: Sequence[tuple[LimitedFeature, Shortage]],
    ) -> Any:
        was_captured = mode is StepMode.REPLAY
        growing = [(feature, largest) for feature, largest in shortages if not largest.is_at_limit]
        if not was_captured and self._has_graphs():
            growing = []  # eager passes with more room than the graphs have would differ
        if self._rank == 0:
            for _, largest in shortages if was_captured else ():
                if largest.is_at_limit:
                    _log.warning(
                        "room does not grow (%s): %s is reached.", largest.name, largest.limit
                    )
        if was_captured and growing:
            self._release()
            why = growing[0][1].name
            self._counters.recaptures.append(why)
            if self._rank == 0:
                _log.warning(
                    "graphs are captured again with more room (%s); recaptures so far: %d.",
                    why,
                    len(self._counters.recaptures),
                )
        with ExitStack() as room:
            for feature, _ in shortages:
                room.enter_context(feature.having_room())
            # After a release the step is one of the eager steps before the next capture.
            result, mode = step(kwargs, not (was_captured and growing))
        assert mode is StepMode.EAGER
        for feature, _ in growing:  # the same on all ranks
            feature.make_room(self._agree)
        return result
