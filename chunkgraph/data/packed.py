"""Documents packed end to end into sequences of one length, and batches drawn from them.

Shapes: b sequences of a microbatch, s tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chunkgraph.data.text import read_documents
from chunkgraph.data.vocabulary import END_OF_DOCUMENT
from chunkgraph.errors import ConfigError

__all__ = ["PackedBatch", "PackedText"]


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One microbatch."""

    tokens: NDArray[np.int64]
    """Tokens, [b, s]."""
    labels: NDArray[np.int64]
    """The token that follows each token, [b, s]."""
    loss_mask: NDArray[np.float32]
    """1 where the label counts, [b, s]; 0 where it is the first byte of an unrelated document."""
    position_ids: NDArray[np.int64]
    """Place of each token in its document, or in the part of it that the sequence holds, [b, s]."""
    document_ids: NDArray[np.int64]
    """Which of the sequence's documents, counted from 0, a token belongs to, [b, s]."""

    @property
    def num_labels(self) -> int:
        """Labels that count."""
        return int(self.loss_mask.sum())

    def part(self, rank: int, num_ranks: int) -> PackedBatch:
        """What one context-parallel rank holds of every sequence, [b, s / num_ranks].

        Of ``2 * num_ranks`` equal pieces, the one at place ``rank`` from the front and the one at
        that place from the end: under a causal mask every rank then has the same work.

        Args:
            rank: Context-parallel rank.
            num_ranks: Context-parallel size; twice it divides the sequence length.
        """
        if num_ranks == 1:
            return self
        pieces = np.split(np.arange(self.tokens.shape[1]), 2 * num_ranks)
        held = np.concatenate([pieces[rank], pieces[2 * num_ranks - 1 - rank]])
        return PackedBatch(
            tokens=self.tokens.take(held, axis=1),
            labels=self.labels.take(held, axis=1),
            loss_mask=self.loss_mask.take(held, axis=1),
            position_ids=self.position_ids.take(held, axis=1),
            document_ids=self.document_ids.take(held, axis=1),
        )

    def attention_mask(self) -> NDArray[np.bool_]:
        """Which keys a query must not see, [b, 1, s, s] (query, key); True is masked.

        Causal, and closed to other documents, so that packing changes no document's result.
        """
        num_tokens = self.tokens.shape[1]
        future = np.triu(np.ones((num_tokens, num_tokens), dtype=np.bool_), k=1)
        foreign = self.document_ids[:, :, None] != self.document_ids[:, None, :]
        masked: NDArray[np.bool_] = (future[None] | foreign)[:, None]
        return masked


class PackedText:
    """Deterministic microbatches of a text.

    Every document is followed by an end-of-document token; all of them form one stream, cut into
    sequences of ``seq_length`` tokens and the one that follows. A batch is a pure function of seed,
    step, microbatch and data-parallel rank, so two runs see the same text whatever else they do.

    Args:
        documents: The documents' bytes.
        seq_length: Tokens of a sequence.
        seed: Seed of the order in which sequences are drawn.

    Raises:
        ConfigError: The text is shorter than one sequence.
    """

    def __init__(self, documents: Sequence[bytes], *, seq_length: int, seed: int) -> None:
        parts: list[NDArray[np.int64]] = []
        end = np.array([END_OF_DOCUMENT], dtype=np.int64)
        for document in documents:
            parts += [np.frombuffer(document, dtype=np.uint8).astype(np.int64), end]
        self._stream = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        self.seq_length = seq_length
        self.seed = seed
        self.num_sequences = (len(self._stream) - 1) // seq_length
        if self.num_sequences < 1:
            msg = (
                f"The text has {len(self._stream)} tokens, fewer than the {seq_length + 1} that a "
                f"sequence of model.seq_length {seq_length} needs. Shorten the sequence, or set "
                "data.path to a longer text."
            )
            raise ConfigError(msg)

    @classmethod
    def from_file(cls, path: str | Path | None, *, seq_length: int, seed: int) -> PackedText:
        """Pack a text file; None is the shipped text.

        Raises:
            ConfigError: The file cannot be read, or is shorter than one sequence.
        """
        return cls(read_documents(path), seq_length=seq_length, seed=seed)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole text, ends of documents included."""
        return len(self._stream)

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Sequence ``index`` and the token that follows it, [s + 1]; shares the stream's memory."""
        if not 0 <= index < self.num_sequences:
            msg = f"sequence {index} of {self.num_sequences}"
            raise IndexError(msg)
        start = index * self.seq_length
        return self._stream[start : start + self.seq_length + 1]

    def batch(
        self, step: int, microbatch: int, micro_batch_size: int, dp_rank: int = 0
    ) -> PackedBatch:
        """One microbatch, drawn with replacement.

        Args:
            step: Training step, from 0.
            microbatch: Microbatch of the step, from 0.
            micro_batch_size: Sequences to draw.
            dp_rank: Data-parallel rank.
        """
        rng = np.random.Generator(np.random.Philox([self.seed, step, microbatch, dp_rank]))
        drawn = rng.integers(self.num_sequences, size=micro_batch_size)
        rows = np.stack([self.sequence(int(index)) for index in drawn])
        tokens, labels = rows[:, :-1].copy(), rows[:, 1:].copy()
        is_end = tokens == END_OF_DOCUMENT
        document_ids = np.cumsum(is_end, axis=1) - is_end
        return PackedBatch(
            tokens=tokens,
            labels=labels,
            loss_mask=np.where(is_end, np.float32(0), np.float32(1)),
            position_ids=_positions(document_ids),
            document_ids=document_ids,
        )


def _positions(document_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distance of each token from the first token of its document in the same row."""
    index = np.broadcast_to(np.arange(document_ids.shape[1]), document_ids.shape)
    starts = np.ones_like(document_ids, dtype=np.bool_)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
