"""Banks: the slots of every chunk for one key, such as a length of its inputs.

A slot holds one microbatch, whatever its bank; so the variants of a slot, one in each bank, are
never in flight together, and may lie in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkgraph.engine.capture.backward_watch import BackwardSample
from chunkgraph.engine.decide.reasons import NO_GRAPHS
from chunkgraph.engine.signature import Call, Signature, flatten_call
from chunkgraph.engine.slot import Slot
from chunkgraph.errors import ConfigError, SlotError

__all__ = ["Bank", "BankSamples", "Banks", "Derive", "StepBanks"]

Derive = Callable[[int, tuple[Any, ...], dict[str, Any], Hashable, Hashable], Any]
"""``(chunk, args, kwargs, of, wanted)`` -> ``(args, kwargs)``: a call of the bank ``wanted``, made
from one of the bank ``of``; only the shapes, dtypes and plain values of it matter."""


@dataclass(frozen=True)
class Banks:
    """The banks to capture: every slot has a variant in each. The same on all ranks.

    Attributes:
        keys: of the banks, largest first.
        derive: makes the call that a bank is captured from out of a call of another bank, if no
            eager step had a microbatch of it; None: capture waits for one.
        drops_failed: if one bank cannot be captured on some rank, all ranks go on without it, and
            steps with a microbatch of it are eager on all of them (`ChunkGraphs.misfit_of`). Ranks
            then ask each other before every graph.

    Raises:
        ConfigError: there is no key, or one is there twice.
    """

    keys: Sequence[Hashable] = (None,)
    derive: Derive | None = None
    drops_failed: bool = False

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys) or not self.keys:
            raise ConfigError(
                f"Banks.keys is {list(self.keys)}; give at least one key, and each key once."
            )


@dataclass(frozen=True)
class Bank:
    """What was captured for one key.

    Attributes:
        key: of the bank.
        slots: by chunk; slot ``k`` here and slot ``k`` of another bank are one slot.
        signatures: what each chunk was captured with.
    """

    key: Hashable
    slots: tuple[tuple[Slot, ...], ...]
    signatures: tuple[Signature, ...]


class StepBanks:
    """Which bank each forward of a step belongs to: the n-th of a chunk to microbatch n.

    Args:
        keys: of all banks, largest first.
        num_chunks: of the rank.

    Attributes:
        keys: of the banks that are captured, or are going to be.
        dropped: the others, and why there are none.
    """

    def __init__(self, keys: Sequence[Hashable], num_chunks: int) -> None:
        self._all = self.keys = tuple(keys)
        self.dropped: dict[Hashable, str] = {}
        self._of_step: tuple[Hashable, ...] | None = None
        self._num_forwards = [0] * num_chunks

    def begin_step(self, keys: Sequence[Hashable] | None) -> None:
        """Count microbatches from 0.

        Args:
            keys: of each microbatch; None: all belong to the first bank.
        """
        self._of_step = None if keys is None else tuple(keys)
        self._num_forwards = [0] * len(self._num_forwards)

    def drop(self, key: Hashable, why: str) -> None:
        """Go on without a bank."""
        self.dropped[key] = why
        self.keys = tuple(k for k in self._all if k not in self.dropped)

    def restore(self) -> None:
        """All banks are going to be captured again."""
        self.dropped = {}
        self.keys = self._all

    def misfit(self, keys: Sequence[Hashable]) -> str:
        """Why microbatches of these banks cannot all be replayed, or ""."""
        for key in keys:
            if key not in self.keys:
                why = self.dropped.get(key, "they were not asked for")
                return f"{NO_GRAPHS}{key}: {why}"
        return ""

    def check(self, keys: Sequence[Hashable] | None, num_microbatches: int | None) -> None:
        """Make sure that a training step says of every microbatch which bank it belongs to.

        Raises:
            SlotError: it does not, or names a bank that there is none of.
        """
        if keys is None:
            if len(self.keys) > 1:
                raise SlotError(
                    f"A training step was begun without the banks of its microbatches; there are "
                    f"{list(self.keys)}. Say of each which it belongs to: step(banks=[...])."
                )
            return
        unknown = [key for key in keys if key not in self.keys]
        if unknown:
            raise SlotError(
                f"Microbatches of the step belong to the banks {unknown}, but there are only "
                f"{list(self.keys)}. Where no bank fits, tell of a misfit, so that the step runs "
                "eagerly on all ranks."
            )
        if num_microbatches is not None and len(keys) != num_microbatches:
            raise SlotError(
                f"The step has {num_microbatches} microbatches, but banks of {len(keys)}. Give one "
                "for each."
            )

    def key_of_next(self, c: int) -> Hashable:
        """The bank of the next forward of chunk ``c``.

        Raises:
            SlotError: the chunk was called for more microbatches than the step was begun with.
        """
        if self._of_step is None:
            return self.keys[0]
        number = self._num_forwards[c]
        if number >= len(self._of_step):
            raise SlotError(
                f"Chunk {c} was called for microbatch {number}, but the step was begun with "
                f"{len(self._of_step)}."
            )
        return self._of_step[number]

    def advance(self, c: int) -> None:
        """The next forward of chunk ``c`` has begun."""
        self._num_forwards[c] += 1


class BankSamples:
    """Calls of eager steps, from which graphs are captured: one for each chunk and bank.

    Args:
        banks: to be captured.
        num_chunks: of the rank.

    Attributes:
        wanted: banks that are captured; calls of the others may serve to derive theirs.
    """

    def __init__(self, banks: Banks, num_chunks: int) -> None:
        self._keys = self.wanted = tuple(banks.keys)
        self._num_chunks = num_chunks
        self._derive = banks.derive
        self._calls: dict[tuple[int, Hashable], Call] = {}
        self._is_new: set[tuple[int, Hashable]] = set()

    def begin_step(self) -> None:
        """Take the first call of each kind of this step instead of earlier ones."""
        self._is_new = set()

    def record(
        self, c: int, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BackwardSample | None:
        """Note a call of a chunk in an eager step.

        Returns:
            What is to be filled in with the call's backward; None where the call is not kept.
        """
        place = (c, key)
        if key not in self._keys or place in self._is_new:
            return None
        backward = BackwardSample()
        call = flatten_call(args, kwargs).sampled()
        self._calls[place] = replace(call, backward=backward)
        self._is_new.add(place)
        return None if call.problem else backward

    def forget(self) -> None:
        """Let the calls go."""
        self._calls = {}

    @property
    def are_complete(self) -> bool:
        """Whether there is a call for every chunk and bank, or one to make it from."""
        return all(
            any((c, key) in self._calls for key in self._keys)
            if self._derive is not None
            else all((c, key) in self._calls for key in self.wanted)
            for c in range(self._num_chunks)
        )

    def by_bank(self) -> dict[Hashable, list[Call]]:
        """For each bank, largest first, a call of each chunk."""
        return {key: [self._call(c, key) for c in range(self._num_chunks)] for key in self.wanted}

    def _call(self, c: int, key: Hashable) -> Call:
        own = self._calls.get((c, key))
        if own is not None:
            return own
        assert self._derive is not None
        of = next(other for other in self._keys if (c, other) in self._calls)
        given = self._calls[c, of]
        args, kwargs = given.arguments()
        with torch.no_grad():
            derived = flatten_call(*self._derive(c, args, kwargs, of, key)).sharing_as(given)
        return replace(
            derived,
            autocast=given.autocast,
            backward=given.backward,
            results=given.results,
            problem=given.problem,
        )
