"""Cut offsets from the largest number of sequences to the number of a microbatch's graphs.

A caller may create all offsets for the most sequences: entries after a microbatch's documents are
empty sequences, and the microbatch replays graphs for fewer. Eager steps get the same cut offsets,
because kernels may be chosen by the number of sequences. Steps before a capture check on the device
that the cut loses no document.
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
    """Intercepts the calls of one rank's chunks; the n-th call of a chunk is microbatch n.

    Args:
        banks: The banks of this rank.
        num_chunks: Number of model chunks of this rank.
    """

    def __init__(self, banks: PackedBanks, num_chunks: int) -> None:
        self._banks = banks
        self._engine: ChunkGraphs | None = None
        self._banks_of_run: Sequence[Hashable] = ()
        self._num_calls = [0] * num_chunks

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Use the engine to check offsets only in steps before a capture."""
        self._engine = graphs.engine

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Start counting calls at the first microbatch."""
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
                uncut = kwargs
                kwargs = cut(self._banks_of_run[number], uncut)
                if kwargs is not uncut and self._may_wait():
                    self._refuse_lost(uncut, kwargs, f"{label}, microbatch {number}")
            return call(args, kwargs)

        return with_cut_offsets

    def _may_wait(self) -> bool:
        """Return whether the host may wait for the device in the running step."""
        engine = self._engine
        return engine is not None and engine.report is None and engine.failure is None

    def _refuse_lost(self, uncut: dict[str, Any], cut: dict[str, Any], where: str) -> None:
        """Refuse offsets with more documents than the step's inputs; read the device."""
        for name, offsets in cut.items():
            if not isinstance(offsets, torch.Tensor) or offsets is uncut[name]:
                continue
            num_seqs = offsets.numel() - 1
            joined = uncut[name][num_seqs - 1 :].diff()  # merged into the last sequence
            if int(joined.count_nonzero()) > 1:
                raise ConfigError(
                    f"{where}: {name} has more than the {num_seqs - 1} documents that graphs of "
                    f"{num_seqs} sequences support, although the inputs of the step listed no "
                    "more. Pass every document (packings=...), or attach with seq_buckets=()."
                )
