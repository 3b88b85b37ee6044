"""Counters of an engine: captures, replays, eager steps and their reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, fields

__all__ = ["Counters"]


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
        recaptures: the reason of each capture with more room.
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

    @property
    def num_fallbacks(self) -> int:
        """Return the number of eager steps."""
        return self.fallbacks.total()
