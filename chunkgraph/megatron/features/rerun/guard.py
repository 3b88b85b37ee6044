"""Steps in which the stash or an expert had no room are run anew, before anyone uses their result.

The flags stay on the device while a step runs. When its schedule is over they are read as they were
behind the last forward, so that the device still runs backwards meanwhile, and all ranks agree on
them on the host. Where one had no room, gradients, random state, buffers and metrics are put back
on all ranks, and the step runs once more, eagerly, from the same inputs. Then there is more room,
and graphs are captured anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from chunkgraph.engine.counters import Counters
from chunkgraph.engine.decide.reasons import Agree, StepMode, agree_alone
from chunkgraph.errors import StashError
from chunkgraph.megatron.core.gloo_agreement import Maximum
from chunkgraph.megatron.features.experts.feature import Experts
from chunkgraph.megatron.features.rerun.rewind import RewindableInputs, StepState
from chunkgraph.megatron.features.stash.feature import ExpertStash

__all__ = ["OverflowGuard", "RunStep"]

_log = logging.getLogger(__name__)

RunStep = Callable[[dict[str, Any], bool], tuple[Any, StepMode]]
"""Runs the schedule with these keywords, eagerly if asked to; its result, and how it ran."""


@dataclass(frozen=True)
class _Overflow:
    """What had no room in a step, the largest over all ranks.

    Attributes:
        is_short: whether pages ran out.
        is_dropping: whether tokens were dropped.
        is_at_limit: whether a rank whose pages ran out may not take more.
    """

    is_short: bool
    is_dropping: bool
    is_at_limit: bool


class OverflowGuard:
    """Runs the training steps of one rank; all ranks have one, with or without experts.

    A step must begin without gradients, as Megatron's does.

    Args:
        state: what a step changes.
        experts: whose tokens find no room.
        stash: whose pages run out, or None.
        agree: see `Agree`.
        release: drops the graphs, so that they are captured anew.
        has_graphs: whether there are any.
        counters: counts what happens.
        max_recaptures: how many times that may be.
        rank: names this rank in the log.
    """

    def __init__(
        self,
        state: StepState,
        experts: Experts,
        stash: ExpertStash | None,
        *,
        agree: Agree | None,
        release: Callable[[], None],
        has_graphs: Callable[[], bool],
        counters: Counters,
        max_recaptures: int,
        rank: int,
    ) -> None:
        self._state = state
        self._experts = experts
        self._stash = stash
        self._agree = agree or agree_alone
        self._release = release
        self._has_graphs = has_graphs
        self._counters = counters
        self._max_recaptures = max_recaptures
        self._rank = rank

    def run(self, step: RunStep, kwargs: dict[str, Any]) -> Any:
        """One training step; see the module's text.

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
            if self._stash is not None:
                self._stash.abandon_step()
            raise
        found = self._look(mode)
        if found is None:
            return result
        del result  # it may be memory of graphs
        inputs.rewind()
        self._state.restore()
        return self._run_again(step, kwargs, mode, found)

    def close(self) -> None:
        """Give back what the ranks agree through."""
        if isinstance(self._agree, Maximum):
            self._agree.close()

    def _look(self, mode: StepMode) -> _Overflow | None:
        """What had no room, on any rank."""
        follows_drops = self._experts.reruns
        if not follows_drops and (self._stash is None or mode is not StepMode.REPLAY):
            return None
        status = None
        if self._stash is not None and mode is StepMode.REPLAY:
            status = self._stash.status()
        dropped = self._experts.look() if follows_drops else 0
        short = status.num_short if status is not None else 0
        at_limit = bool(short and status and self._stash and not self._stash.can_grow(status))
        # Of the step before: this one's backwards are under way.
        left = self._stash.num_pages_left() if self._stash is not None else 0
        late = self._stash.num_short_late() if self._stash is not None else 0
        *agreed, most_left, most_late = self._agree([short, dropped, int(at_limit), left, late])
        if most_left and self._stash is not None:  # on all ranks: none waits for one that raised
            self._stash.abandon_step()
            raise StashError(
                f"Rank {self._rank}: {left} pages of the stash were not given back in the step "
                f"before (on one rank {most_left}), though every microbatch was run backward. "
                "Please report it; stash.enabled=false trains without."
            )
        if most_late and self._stash is not None:
            self._stash.abandon_step()
            raise StashError(
                f"Rank {self._rank}: {late} tensors found no page of the stash in the step before "
                f"(on one rank {most_late}) after its last forward, where nothing is stashed: its "
                "gradients were wrong. Are experts computed anew in the backward, by a layer of "
                "your own? Train without the stash (stash.enabled=false), or without that."
            )
        if not (agreed[0] or agreed[1]):
            return None
        told = self._told(short, dropped, status)
        if agreed[0] and self._stash is not None and self._stash.options.on_overflow == "raise":
            raise StashError(
                f"Pages of the stash ran out in this step: {told}. Its gradients are wrong; the "
                "optimizer has not used them.\n  To do: raise stash.headroom or stash.max_bytes, "
                "or set stash.on_overflow=rerun."
            )
        if agreed[0] and status is not None and self._stash is not None:
            self._stash.grow(status)  # a rank that had just enough takes more, too
        for name, count in (("stash pages", agreed[0]), ("expert capacity", agreed[1])):
            if count:
                self._counters.overflow_reruns[name] += 1
        if short or dropped or self._rank == 0:
            _log.warning("rank %d: the step is run anew eagerly: %s.", self._rank, told)
        return _Overflow(*map(bool, agreed))

    def _told(self, short: int, dropped: int, status: Any) -> str:
        reasons = []
        if short and self._stash is not None and self._stash.size is not None:
            size = self._stash.size
            reasons.append(
                f"{short} saved tensors found no page of the stash (it has {size.total_pages} of "
                f"{size.page_bytes} bytes, {status.num_peak_pages} were wanted)"
            )
        if dropped:
            reasons.append(f"{dropped} {self._experts.words.counted}")
        return " and ".join(reasons) or "another rank had no room"

    def _run_again(
        self, step: RunStep, kwargs: dict[str, Any], mode: StepMode, found: _Overflow
    ) -> Any:
        was_captured = mode is StepMode.REPLAY
        if was_captured:
            grows = len(self._counters.recaptures) < self._max_recaptures
        else:  # with more room than the graphs have, eager passes would be others than replays
            grows = not self._has_graphs()
        grows = grows and not found.is_at_limit
        if was_captured and grows:
            self._release()
            why = "stash pages" if found.is_short else "expert capacity"
            self._counters.recaptures.append(why)
            if self._rank == 0:
                _log.warning(
                    "graphs are captured anew with more room (%s), %d of at most %d times.",
                    why,
                    len(self._counters.recaptures),
                    self._max_recaptures,
                )
        elif self._rank == 0 and was_captured:
            limit = "memory" if found.is_at_limit else f"{self._max_recaptures} captures"
            _log.warning("room stays as it is: the limit of %s is reached.", limit)
        with self._experts.room_for_all() if found.is_dropping else nullcontext():
            # After a release it is one of the steps before the capture, and eager by itself.
            result, mode = step(kwargs, not (was_captured and grows))
        assert mode is StepMode.EAGER
        if found.is_dropping and grows:  # on all ranks, or on none
            (load,) = self._agree([self._experts.heaviest_load()])
            self._experts.give_room(load)
        self._experts.forget_step()
        return result
