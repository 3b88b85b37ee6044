"""Sources of the documents of a pretrain script's steps and of its model's arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from chunkgraph.errors import ConfigError
from chunkgraph.launch.sft_data import Documents, documents_of
from chunkgraph.megatron.core.gloo_agreement import Share

__all__ = ["DocumentSource", "Microbatches", "StepData", "Turn"]

Microbatches = Sequence["deque[dict[str, Any]] | None"]
"""The microbatches of a step for each model chunk; None for a chunk that another rank reads."""

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Turn:
    """A microbatch of the running step on this rank.

    Attributes:
        num_offsets: Number of offsets that the forward step computes from its data.
        inputs: Function that computes keyword arguments of the model from the forward step's
            packed-sequence parameters; they replace the forward step's own.
    """

    num_offsets: int
    inputs: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class StepData:
    """The data and arguments that a step runs with.

    Attributes:
        batches: Data for the forward step.
        turns: The microbatches, in order.
        keywords: Additional keywords for the schedule.
        metrics_scales: Factors for metrics; see `PackedSteps`.
    """

    batches: Microbatches
    turns: Sequence[Turn]
    keywords: dict[str, Any] = field(default_factory=dict)
    metrics_scales: tuple[float, float] | None = None


class DocumentSource(ABC):
    """Determines the documents of each microbatch of a step from the samples that are read.

    Args:
        rank: The rank, for errors.
        share: Function that broadcasts a value of the first tensor-parallel rank, which reads
            data, to the others; None without tensor parallelism.
    """

    def __init__(self, rank: int, share: Share | None = None) -> None:
        self._rank = rank
        self._share = share

    @abstractmethod
    def begin(self, read: Microbatches, kwargs: dict[str, Any]) -> StepData:
        """Begin a step.

        Args:
            read: The microbatches that the forward step would read.
            kwargs: Keywords of the schedule.
        """

    @abstractmethod
    def announce_next(self, num_microbatches: int, iterators: Sequence[Any]) -> None:
        """Announce the documents of the next training step, if they are known in advance.

        All ranks must call this together, between two training steps.

        Args:
            num_microbatches: Number of microbatches of the next step.
            iterators: The data iterators of the last schedule call, one for each chunk.
        """

    def close(self) -> None:
        """Release process groups."""
        if self._share is not None:
            self._share.close()

    def _documents_of(
        self, read: Microbatches, seq_length: int, *, may_be_cut: bool, multiple_of: int = 1
    ) -> list[list[Documents]]:
        """Return the documents of each sample, for each chunk that reads."""
        return [
            [
                documents_of(
                    batch,
                    seq_length,
                    f"rank {self._rank}, microbatch {i}",
                    may_be_cut=may_be_cut,
                    multiple_of=multiple_of,
                )
                for i, batch in enumerate(batches)
            ]
            for batches in read
            if batches is not None
        ]

    def _of_chunks(self, values: Sequence[_Value]) -> _Value | None:
        """Return the value that all chunks agree on; None if another rank reads.

        Raises:
            ConfigError: The values differ.
        """
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"rank {self._rank}: the data iterators of its model chunks give different "
                "documents for the same microbatch. They must read the same samples."
            )
        return values[0] if values else None

    def _shared(self, local: _Value | None) -> _Value:
        """Return the first tensor-parallel rank's value on all tensor-parallel ranks.

        Raises:
            ConfigError: No rank reads data.
        """
        shared = self._share(local) if self._share is not None else local
        if shared is None:
            raise ConfigError(
                f"rank {self._rank}: its stage has no data iterator. With packed sequences every "
                "stage reads where documents begin; the script's data set provider must build "
                "the data set on all stages, as pretrain_gpt.py does with --sft."
            )
        return shared
