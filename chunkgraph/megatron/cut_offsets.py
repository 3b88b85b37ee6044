"""Offsets of the most sequences, cut to as many as a microbatch's graphs are for.

A caller may make all offsets for the most sequences: those behind a microbatch's documents say
nothing, and it replays graphs for fewer. Eager steps get the same offsets, so that kernels, which
may choose by the number of sequences, choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from chunkgraph.megatron.buckets import Buckets
from chunkgraph.megatron.contexts import ContextBanks

__all__ = ["OffsetCutter"]

_Call = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class OffsetCutter:
    """Stands before the calls of one rank's chunks; the n-th of a chunk is microbatch n.

    Args:
        banks: what graphs are captured for.
        num_chunks: of the rank.
        call: what the arguments go to: chunk, positional and keyword arguments.
    """

    def __init__(self, banks: Buckets | ContextBanks, num_chunks: int, call: _Call) -> None:
        self._banks = banks
        self._call = call
        self._of_run: Sequence[Hashable] = ()
        self._num_calls = [0] * num_chunks

    def begin_run(self, keys: Sequence[Hashable]) -> None:
        """The schedule begins with microbatches of these banks."""
        self._of_run = keys
        self._num_calls = [0] * len(self._num_calls)

    def call(self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call chunk ``c`` for its next microbatch."""
        number = self._num_calls[c]
        self._num_calls[c] += 1
        if number < len(self._of_run):
            kwargs = self._banks.with_offsets_of(self._of_run[number], kwargs)
        return self._call(c, args, kwargs)
