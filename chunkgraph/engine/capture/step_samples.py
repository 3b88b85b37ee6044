"""Count eager warmup steps, and record their calls as samples for the capture."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from chunkgraph.engine.banks import BankSamples, StepBanks
from chunkgraph.engine.capture.output_gradients import BackwardSample
from chunkgraph.engine.decide.decider import SHAPE_UNKNOWN

__all__ = ["StepSampler"]


class StepSampler:
    """Record calls of eager steps until a session captures from them.

    Args:
        calls: the recorded calls.
        banks: the banks of the microbatches of each step.
        num_steps: number of eager steps before a session.

    Attributes:
        shape_key: shape key of the steps whose calls are recorded.
    """

    def __init__(self, calls: BankSamples, banks: StepBanks, num_steps: int) -> None:
        self.shape_key: Hashable = SHAPE_UNKNOWN
        self._calls = calls
        self._banks = banks
        self._num_steps = num_steps
        self._num_seen = 0
        self._is_recording = False

    def is_ready(self, shape_key: Hashable) -> bool:
        """Return whether graphs for steps of this key can be captured now."""
        return (
            self._num_seen >= self._num_steps
            and self._calls.are_complete
            and shape_key == self.shape_key
        )

    @contextmanager
    def step(self, shape_key: Hashable) -> Iterator[None]:
        """Run one eager step in this block; count it if it ends without an exception.

        After an exception its calls are not captured, since their backwards may not have run, nor
        is a call whose backward did not run.
        """
        if shape_key != self.shape_key:
            self._calls.forget()
        self._calls.begin_step()
        self.shape_key = shape_key
        self._is_recording = True
        try:
            yield
        except BaseException:
            self._calls.forget()
            raise
        finally:
            self._is_recording = False
        self._calls.end_step()
        self._num_seen += 1

    def record(
        self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BackwardSample | None:
        """Record a call of chunk ``c``, if the step is being recorded.

        Returns:
            A sample to fill in when the call's backward runs; None if the call is not recorded.
        """
        if not self._is_recording:
            return None
        backward = self._calls.record(c, self._banks.key_of_next(c), args, kwargs)
        self._banks.advance(c)
        return backward

    def restart(self) -> None:
        """Count steps from 0 again."""
        self._num_seen = 0
