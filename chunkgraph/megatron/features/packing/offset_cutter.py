"""Offsets of the most sequences, cut to as many as a microbatch's graphs are for.

A caller may make all offsets for the most sequences: those behind a microbatch's documents say
nothing, and it replays graphs for fewer. Eager steps get the same offsets, so that kernels, which
may choose by the number of sequences, choose alike. That documents were told as the offsets have
them is looked at on the device in the steps before a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.features.contexts import ContextBanks
from chunkgraph.megatron.features.packing.banks import Buckets

__all__ = ["OffsetCutter"]

_Call = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class OffsetCutter:
    """Stands before the calls of one rank's chunks; the n-th of a chunk is microbatch n.

    Args:
        banks: what graphs are captured for.
        call: what the arguments go to: chunk, positional and keyword arguments.
        labels: of the rank's chunks, for errors.
        may_wait: whether the host may wait for the device in the step that runs.
    """

    def __init__(
        self,
        banks: Buckets | ContextBanks,
        call: _Call,
        labels: Sequence[str],
        may_wait: Callable[[], bool],
    ) -> None:
        self._banks = banks
        self._call = call
        self._labels = labels
        self._may_wait = may_wait
        self._of_run: Sequence[Hashable] = ()
        self._num_calls = [0] * len(labels)

    def begin_run(self, keys: Sequence[Hashable]) -> None:
        """The schedule begins with microbatches of these banks."""
        self._of_run = keys
        self._num_calls = [0] * len(self._num_calls)

    def call(self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call chunk ``c`` for its next microbatch.

        Raises:
            ConfigError: documents would become one that the step was not told of.
        """
        number = self._num_calls[c]
        self._num_calls[c] += 1
        if number < len(self._of_run):
            given = kwargs
            kwargs = self._banks.with_offsets_of(self._of_run[number], given)
            if kwargs is not given and self._may_wait():
                self._refuse_lost(given, kwargs, f"{self._labels[c]}, microbatch {number}")
        return self._call(c, args, kwargs)

    def _refuse_lost(self, given: dict[str, Any], cut: dict[str, Any], where: str) -> None:
        """Refuse offsets that hold more documents than the step was told; reads the device."""
        for name, offsets in cut.items():
            if not isinstance(offsets, torch.Tensor) or offsets is given[name]:
                continue
            num_seqs = offsets.numel() - 1
            joined = given[name][num_seqs - 1 :].diff()  # the last sequence is all of these
            if int(joined.count_nonzero()) > 1:
                raise ConfigError(
                    f"{where}: {name} holds more than the {num_seqs - 1} documents that graphs of "
                    f"{num_seqs} sequences take, and by what the step was told they were enough. "
                    "Tell it every document (packings=...), or attach with seq_buckets=()."
                )
