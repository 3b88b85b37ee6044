"""Offsets of the most sequences, cut to as many as a microbatch's graphs are for.

A caller may make all offsets for the most sequences: those behind a microbatch's documents say
nothing, and it replays graphs for fewer. Eager steps get the same offsets, so that kernels, which
may choose by the number of sequences, choose alike. That documents were told as the offsets have
them is looked at on the device in the steps before a capture.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.feature import Feature
from chunkgraph.megatron.step import Step

if TYPE_CHECKING:
    from chunkgraph.engine import ChunkGraphs
    from chunkgraph.megatron.attached import MegatronChunkGraphs
    from chunkgraph.megatron.captured_part import Call, CapturedPart
    from chunkgraph.megatron.features.packing.banks import PackedBanks

__all__ = ["OffsetCutter"]


class OffsetCutter(Feature):
    """Stands before the calls of one rank's chunks; the n-th call of a chunk is microbatch n.

    Args:
        banks: of this rank.
        num_chunks: model chunks of this rank.
    """

    def __init__(self, banks: PackedBanks, num_chunks: int) -> None:
        self._banks = banks
        self._engine: ChunkGraphs | None = None
        self._banks_of_run: Sequence[Hashable] = ()
        self._num_calls = [0] * num_chunks

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Look at offsets in steps before a capture: in neither replays nor other training."""
        self._engine = graphs.engine

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Begin with the first microbatch."""
        self._banks_of_run = step.plan.cut_for
        self._num_calls = [0] * len(self._num_calls)
        yield

    def call(self, part: CapturedPart, call: Call) -> Call:
        """Cut the offsets of each microbatch to the sequences of its bank."""
        if not self._banks.has_fewer_sequences:
            return call
        cut, label, index = self._banks.with_offsets_of, part.label, part.index

        def with_cut_offsets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            number = self._num_calls[index]
            self._num_calls[index] += 1
            if number < len(self._banks_of_run):
                given = kwargs
                kwargs = cut(self._banks_of_run[number], given)
                if kwargs is not given and self._may_wait():
                    self._refuse_lost(given, kwargs, f"{label}, microbatch {number}")
            return call(args, kwargs)

        return with_cut_offsets

    def _may_wait(self) -> bool:
        """Whether the host may wait for the device in the step that runs."""
        engine = self._engine
        return engine is not None and engine.report is None and engine.failure is None

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
