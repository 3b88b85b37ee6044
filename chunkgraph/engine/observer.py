"""Follow every replay from outside, as counters, hooks, profiler ranges and `verify` do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from chunkgraph.engine.chunk import Chunk, GradientMarker, ReplayAction
from chunkgraph.engine.slot import Slot

Tensors = Sequence[torch.Tensor | None]
"""Arguments of a call, or the gradients of outputs; None for one without."""


class Observer:
    """Override the methods that are needed; by default all do nothing."""

    def observes(self, step: int | None) -> bool:
        """Return whether to follow a step.

        Args:
            step: Number of the replayed step after the capture, from 0; None for a step that runs
                eagerly.
        """
        return step is not None

    def begin_step(self, step: int | None) -> None:
        """Begin a step that it observes."""

    def before(self, action: ReplayAction, slot: Slot, tensors: Tensors) -> None:
        """Follow a replay that is about to load its inputs.

        Args:
            action: The replay to come.
            slot: The slot.
            tensors: The call's tensor arguments, or the gradients of the outputs; none for a
                third action.
        """

    def after(self, action: ReplayAction, slot: Slot) -> None:
        """Follow a replay that the host has launched, before the caller gets the results."""

    def called(self, c: int, result: Any) -> None:
        """Follow an eager forward of chunk ``c``, inside or outside of a step."""

    def end_step(self, *, has_failed: bool) -> None:
        """End the step.

        Args:
            has_failed: Whether an exception ends it.
        """


class ChunkHooks(Observer):
    """Call the chunks' own hooks before their replays.

    Args:
        chunks: The chunks of the rank.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._hooks = {
            (c, action): hook
            for c, chunk in enumerate(chunks)
            for action, hook in zip(
                chunk.actions, (chunk.before_forward, chunk.before_backward), strict=False
            )
            if hook is not None
        }

    def observes(self, step: int | None) -> bool:
        """See `Observer`."""
        return step is not None and bool(self._hooks)

    def before(self, action: ReplayAction, slot: Slot, tensors: object) -> None:  # noqa: ARG002
        """Call the hook of a replay."""
        hook = self._hooks.get((slot.chunk, action))
        if hook is not None:
            hook()


class GradientMarkers(Observer):
    """Tell every slot's marker that its gradients are accumulated.

    Args:
        markers: The markers of the slots that have one.
        last: The last action of each chunk.
    """

    def __init__(
        self, markers: Mapping[Slot, GradientMarker], last: Sequence[ReplayAction]
    ) -> None:
        self._markers, self._last = markers, tuple(last)

    def observes(self, step: int | None) -> bool:
        """See `Observer`."""
        return step is not None and bool(self._markers)

    def after(self, action: ReplayAction, slot: Slot) -> None:
        """Follow the replay that adds the gradients."""
        if action == self._last[slot.chunk] and slot in self._markers:
            self._markers[slot].replayed()


@dataclass(repr=False)
class Counters:
    """Totals since the engine was created.

    Attributes:
        captures: captured forwards, each with its backward.
        capture_sessions: sessions that succeeded.
        replays: replayed forwards, one per microbatch and chunk.
        replays_of_bank: replayed forwards by key of the bank.
        backward_replays: replayed backwards; for split backwards, their input halves.
        weight_replays: replayed weight halves.
        replayed_steps: steps in which at least one microbatch was replayed.
        fallbacks: eager steps by reason.
        packing_overflows: eager steps whose packed sequences did not fit, by the misfit on this
            rank, or ``on another rank``.
        missing_banks: eager steps with a microbatch of a bank without graphs, by bank and reason,
            or ``on another rank``.
        overflow_reruns: steps that ran again because a limit overflowed, by the name of the limit.
        recaptures: the reason of each capture that replaced graphs.
    """

    captures: int = 0
    capture_sessions: int = 0
    replays: int = 0
    replays_of_bank: Counter[Hashable] = field(default_factory=Counter)
    backward_replays: int = 0
    weight_replays: int = 0
    replayed_steps: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    packing_overflows: Counter[str] = field(default_factory=Counter)
    missing_banks: Counter[str] = field(default_factory=Counter)
    overflow_reruns: Counter[str] = field(default_factory=Counter)
    recaptures: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return the counters that are not zero."""
        counts = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name)}
        values = {k: dict(v) if isinstance(v, Counter) else v for k, v in counts.items()}
        return f"Counters({', '.join(f'{name}={value!r}' for name, value in values.items())})"


class ReplayCounters(Observer):
    """Count replays.

    Args:
        counters: The counters to add to.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def after(self, action: ReplayAction, slot: Slot) -> None:
        """Count a replay."""
        counters = self._counters
        if action == "F":
            counters.replays += 1
            counters.replays_of_bank[slot.bank] += 1
        elif action == "W":
            counters.weight_replays += 1
        else:
            counters.backward_replays += 1


_NAMES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradient"}


class NamedReplays(Observer):
    """Name every replay as ``<chunk> forward microbatch 3``.

    Microbatches count from 0 in each step, in the order of the chunk's forwards.

    Args:
        names: The name of each chunk.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.begin_step(0)

    def begin_step(self, step: int | None) -> None:  # noqa: ARG002
        """Count microbatches from 0 again."""
        self._next = [0] * len(self._names)
        self._microbatch: dict[int, int] = {}  # by turn

    def before(self, action: ReplayAction, slot: Slot, tensors: Tensors) -> None:  # noqa: ARG002
        """Count the microbatch of a replay."""
        if action == "F":
            c = slot.chunk
            self._microbatch[slot.turn] = self._next[c]
            self._next[c] += 1

    def microbatch(self, slot: Slot) -> int:
        """Return the microbatch that the slot holds."""
        return self._microbatch.get(slot.turn, 0)

    def name(self, action: ReplayAction, c: int, microbatch: int) -> str:
        """Return the name of a replay of chunk ``c``."""
        return f"{self._names[c]} {_NAMES[action]} microbatch {microbatch}"


class ReplayRanges(NamedReplays):
    """Show the names of replays to profilers (NVTX on a GPU); see `NamedReplays`."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._open = ExitStack()

    def before(self, action: ReplayAction, slot: Slot, tensors: Tensors) -> None:
        """Begin the range of a replay."""
        super().before(action, slot, tensors)
        name = self.name(action, slot.chunk, self.microbatch(slot))
        self._open.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_initialized():
            self._open.enter_context(torch.cuda.nvtx.range(name))

    def after(self, action: ReplayAction, slot: Slot) -> None:  # noqa: ARG002
        """End the range."""
        self._open.close()

    def end_step(self, *, has_failed: bool) -> None:  # noqa: ARG002
        """End a range whose replay failed."""
        self._open.close()
