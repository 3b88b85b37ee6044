"""Banks: variants of the slots of every chunk by key, such as the length of the inputs.

A slot holds one microbatch in any bank. So the variants of a slot, one in each bank, are never in
flight together and share memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkgraph.engine.arguments import rank_label
from chunkgraph.engine.capture.output_gradients import BackwardSample
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.step import NO_GRAPHS, SHAPE_UNKNOWN
from chunkgraph.engine.tree import Call, flatten_call
from chunkgraph.errors import ConfigError, SlotError

Derive = Callable[[int, tuple[Any, ...], dict[str, Any], Hashable, Hashable], Any]
"""``(chunk, args, kwargs, source, target)`` -> ``(args, kwargs)``: derives a call of the bank
``target`` from a call of the bank ``source``. Only shapes, dtypes and plain values matter."""


@dataclass(frozen=True)
class Banks:
    """The banks to capture: every slot has a variant in each. The same on all ranks.

    Attributes:
        keys: keys of the banks, largest first.
        derive: derives a call to capture a bank from, if no eager step had a microbatch of this
            bank; None: the capture waits for one.
        drops_failed: whether all ranks continue without a bank that some rank cannot capture.
            Steps with a microbatch of it are then eager on all ranks (`ChunkGraphs.misfit_of`).
            Ranks communicate before every graph.

    Raises:
        ConfigError: there is no key, or a key is repeated.
    """

    keys: Sequence[Hashable] = (None,)
    derive: Derive | None = None
    drops_failed: bool = False

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys) or not self.keys:
            raise ConfigError(
                f"Banks.keys is {list(self.keys)}; it must have at least one key, and each once."
            )


class StepBanks:
    """The bank of each forward of a step: the n-th forward of a chunk is of microbatch n.

    Args:
        banks: the banks to capture.
        num_chunks: number of chunks of the rank.

    Attributes:
        all_keys: keys of all banks, largest first.
        derive: see `Banks`.
        drops_failed: see `Banks`.
        keys: keys of the banks that are or will be captured: of all that were not dropped.
    """

    def __init__(self, banks: Banks, num_chunks: int) -> None:
        self.all_keys = self.keys = tuple(banks.keys)
        self.derive, self.drops_failed = banks.derive, banks.drops_failed
        self._of_step: tuple[Hashable, ...] | None = None
        self._num_forwards = [0] * num_chunks

    def begin_step(self, keys: Sequence[Hashable] | None) -> None:
        """Count microbatches from 0 again.

        Args:
            keys: the bank of each microbatch; None: all belong to the first bank.
        """
        self._of_step = None if keys is None else tuple(keys)
        self._num_forwards = [0] * len(self._num_forwards)

    def drop(self, key: Hashable) -> None:
        """Continue without a bank whose capture failed."""
        self.keys = tuple(k for k in self.keys if k != key)

    def restore(self) -> None:
        """Forget dropped banks, before all are captured again."""
        self.keys = self.all_keys

    def misfit(self, keys: Sequence[Hashable]) -> str:
        """Return why microbatches of these banks cannot all be replayed, or ""."""
        for key in keys:
            if key not in self.keys:
                is_dropped = key in self.all_keys
                why = "its capture failed" if is_dropped else "they were not requested"
                return f"{NO_GRAPHS}{key}: {why}"
        return ""

    def check(self, keys: Sequence[Hashable] | None, num_microbatches: int | None) -> None:
        """Check the banks of a training step's microbatches.

        Raises:
            SlotError: their number is wrong, or there is no such bank.
        """
        if keys is None:
            if len(self.keys) > 1:
                raise SlotError(
                    f"A training step began without the banks of its microbatches; there are "
                    f"{list(self.keys)}. Pass one for each: step(plan=StepPlan(banks=[...]))."
                )
            return
        unknown = [key for key in keys if key not in self.keys]
        if unknown:
            raise SlotError(
                f"Microbatches of the step belong to the banks {unknown}, but there are only "
                f"{list(self.keys)}. If no bank fits, pass a misfit, so that the step runs eagerly "
                "on all ranks."
            )
        if num_microbatches is not None and len(keys) != num_microbatches:
            raise SlotError(
                f"The step has {num_microbatches} microbatches, but {len(keys)} banks. Pass one "
                "bank for each microbatch."
            )

    def bank_of_next(self, c: int) -> Hashable:
        """Return the bank of the next forward of chunk ``c``.

        Raises:
            SlotError: the step has no more microbatches.
        """
        if self._of_step is None:
            return self.keys[0]
        number = self._num_forwards[c]
        if number >= len(self._of_step):
            raise SlotError(
                f"Chunk {c} was called for microbatch {number}, but the step has only "
                f"{len(self._of_step)} microbatches."
            )
        return self._of_step[number]

    def advance(self, c: int) -> None:
        """Count a forward of chunk ``c``."""
        self._num_forwards[c] += 1


_PATIENCE = 10  # steps without a capture after the warmup, before a warning


class Samples:
    """Calls of eager steps from which graphs are captured, one for each chunk and bank.

    Args:
        banks: the banks of the microbatches of each step.
        chunks: chunks of the rank.
        num_steps: number of eager steps before a session.
        warns: whether to warn if many steps give no session.

    Attributes:
        shape_key: shape key of the steps whose calls are recorded.
    """

    def __init__(
        self, banks: StepBanks, chunks: Sequence[Chunk], num_steps: int, *, warns: bool = True
    ) -> None:
        self.shape_key: Hashable = SHAPE_UNKNOWN
        self._banks = banks
        self._derive = banks.derive
        self._label = rank_label(chunks)
        self._chunks = range(len(chunks))
        self._num_steps, self._warns = num_steps, warns
        self._num_seen = 0
        self._num_restarts = 0  # since the shape key changed
        self._calls: dict[tuple[int, Hashable], Call] = {}
        self._of_step: dict[tuple[int, Hashable], BackwardSample] | None = None
        self._siblings: list[list[BackwardSample]] = []  # by chunk

    def is_ready(self, shape_key: Hashable) -> bool:
        """Return whether graphs for steps of this key can be captured now.

        Every chunk must have a call in every bank, or one to derive it from.
        """
        enough = all if self._derive is None else any
        keys = self._banks.keys if self._derive is None else self._banks.all_keys
        return (
            self._num_seen >= self._num_steps
            and shape_key == self.shape_key
            and all(enough((c, key) in self._calls for key in keys) for c in self._chunks)
        )

    def _lack(self) -> str:
        """Return why nothing can be captured after many steps, and what to do."""
        idle = [c for c in self._chunks if not any(place[0] == c for place in self._calls)]
        if idle:
            return (
                f"no backward of chunk {idle[0]} ran in a step. Call it in step(), with gradients "
                "enabled, and do not detach its outputs before the loss."
            )
        if self._num_restarts > 1:
            return (
                f"the shapes of steps changed {self._num_restarts} times, and are {self.shape_key} "
                "now. Give all steps one shape (pad them), or packed sequences with buckets."
            )
        return "another rank cannot capture, and warns of the cause."

    @contextmanager
    def step(self, shape_key: Hashable) -> Iterator[None]:
        """Run one eager step in this block; count it if it ends without an exception.

        The first call of each kind replaces that of earlier steps. After an exception no call is
        captured, since their backwards may not have run, nor is a call whose backward did not run.
        """
        if shape_key != self.shape_key:
            self._num_restarts += self.shape_key is not SHAPE_UNKNOWN
            self.forget()
        self.shape_key = shape_key
        of_step = self._of_step = {}
        self._siblings = [[] for _ in self._chunks]
        try:
            yield
        except BaseException:
            self.forget()
            raise
        finally:
            self._of_step = None
        for place, backward in of_step.items():
            if backward.is_observable and backward.strides is None:
                del self._calls[place]
        self._num_seen += 1
        if self._warns and self._num_seen == self._num_steps + _PATIENCE:
            warnings.warn(
                f"{self._label}: {self._num_seen} steps ran eagerly, and no graph was captured: "
                f"{self._lack()}",
                stacklevel=7,
            )

    def record(
        self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BackwardSample | None:
        """Record a call of chunk ``c``, if it is the first of its bank in a recorded step.

        Returns:
            A sample to fill in when the call's backward runs; None outside of recorded steps.
        """
        if self._of_step is None:
            return None
        place = c, self._banks.bank_of_next(c)
        self._banks.advance(c)
        backward = BackwardSample(siblings=self._siblings[c])
        self._siblings[c].append(backward)
        if place in self._of_step:
            return backward
        self._of_step[place] = backward
        call = flatten_call(args, kwargs).sampled()
        self._calls[place] = replace(call, backward=backward)
        return None if call.problem else backward

    def forget(self) -> None:
        """Drop the calls."""
        self._calls = {}

    def restart(self) -> None:
        """Count steps from 0 again."""
        self._num_seen = self._num_restarts = 0

    def by_bank(self) -> dict[Hashable, list[Call]]:
        """Return a call of each chunk for each bank to capture, largest bank first."""
        return {key: [self._call(c, key) for c in self._chunks] for key in self._banks.keys}

    def _call(self, c: int, key: Hashable) -> Call:
        recorded = self._calls.get((c, key))
        if recorded is not None:
            return recorded
        assert self._derive is not None
        source_key = next(k for k in self._banks.all_keys if (c, k) in self._calls)
        source = self._calls[c, source_key]
        args, kwargs = source.arguments()
        with torch.no_grad():
            call = flatten_call(*self._derive(c, args, kwargs, source_key, key)).sharing_as(source)
        return replace(source, leaves=call.leaves, spec=call.spec)
