"""Where a pretrain script's steps have their documents from, and what its model is called with."""

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
"""Of each model chunk those of a step; None where another rank reads them."""

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Turn:
    """A microbatch of the step that runs, on this rank.

    Attributes:
        num_offsets: offsets that the forward step makes of the data that it is handed.
        inputs: makes arguments of the model, by name, from the parameters that the forward step
            made; they take the place of its own.
    """

    num_offsets: int
    inputs: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class StepData:
    """What a step is run with.

    Attributes:
        handed: what its forward step is handed.
        turns: its microbatches.
        keywords: what the schedule is called with besides.
        metrics_scales: see `PackedSteps`.
    """

    handed: Microbatches
    turns: Sequence[Turn]
    keywords: dict[str, Any] = field(default_factory=dict)
    metrics_scales: tuple[float, float] | None = None


class DocumentSource(ABC):
    """Settles which documents each microbatch of a step holds, from the samples that are read.

    Args:
        rank: named in errors.
        share: gives a value of the first tensor-parallel rank, which reads data, to all of them;
            None where there is one.
    """

    def __init__(self, rank: int, share: Share | None = None) -> None:
        self._rank = rank
        self._share = share

    @abstractmethod
    def begin(self, read: Microbatches, kwargs: dict[str, Any]) -> StepData:
        """Begin a step.

        Args:
            read: what its forward step would read.
            kwargs: what the schedule is called with.
        """

    @abstractmethod
    def announce_next(self, num_microbatches: int, iterators: Sequence[Any]) -> None:
        """Say what the training step that comes next holds, where that is known before it.

        Called between two of them, on all ranks together.

        Args:
            num_microbatches: of that step.
            iterators: what the schedule was given last, of each chunk.
        """

    def close(self) -> None:
        """Give process groups back."""
        if self._share is not None:
            self._share.close()

    def _documents_of(
        self, read: Microbatches, seq_length: int, *, may_be_cut: bool, multiple_of: int = 1
    ) -> list[list[Documents]]:
        """Return the documents of each sample that is read, for each chunk that reads."""
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
        """Return what the data of all chunks say; None where another rank reads.

        Raises:
            ConfigError: they differ.
        """
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"rank {self._rank}: the data iterators of its model chunks give other documents "
                "for the same microbatch. They have to read the same samples."
            )
        return values[0] if values else None

    def _shared(self, own: _Value | None) -> _Value:
        """Return what the first tensor-parallel rank knows, on all of them.

        Raises:
            ConfigError: nobody reads.
        """
        shared = self._share(own) if self._share is not None else own
        if shared is None:
            raise ConfigError(
                f"rank {self._rank}: its stage has no data iterator. With packed sequences every "
                "stage reads where documents begin; the script's data set provider has to build "
                "the data set on all of them, as pretrain_gpt.py does with --sft."
            )
        return shared
