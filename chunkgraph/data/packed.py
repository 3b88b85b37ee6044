"""Pack documents end to end into sequences of one length, and draw batches of them.

Shapes: b, the sequences of a microbatch; s, the tokens of a sequence.
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
    """Position of each token in the part of its document that the sequence holds, [b, s]."""
    document_ids: NDArray[np.int64]
    """Index of each token's document in the sequence, from 0, [b, s]."""

    @property
    def num_labels(self) -> int:
        """Return the number of labels that count."""
        return int(self.loss_mask.sum())

    def part(self, rank: int, num_ranks: int) -> PackedBatch:
        """Return one context-parallel rank's part of every sequence, [b, s / num_ranks].

        Of ``2 * num_ranks`` equal pieces, a rank holds piece ``rank`` from the front and piece
        ``rank`` from the end, so all ranks have the same work under a causal mask.

        Args:
            rank: context-parallel rank.
            num_ranks: context-parallel size; twice this divides the sequence length.
        """
        if num_ranks == 1:
            return self
        pieces = np.split(np.arange(self.tokens.shape[1]), 2 * num_ranks)
        columns = np.concatenate([pieces[rank], pieces[2 * num_ranks - 1 - rank]])
        return PackedBatch(
            tokens=self.tokens.take(columns, axis=1),
            labels=self.labels.take(columns, axis=1),
            loss_mask=self.loss_mask.take(columns, axis=1),
            position_ids=self.position_ids.take(columns, axis=1),
            document_ids=self.document_ids.take(columns, axis=1),
        )

    def attention_mask(self) -> NDArray[np.bool_]:
        """Return the causal mask within documents, [b, 1, s, s] (query, key); True is masked.

        Other documents are masked too, so packing does not change the result of any document.
        """
        num_tokens = self.tokens.shape[1]
        future = np.triu(np.ones((num_tokens, num_tokens), dtype=np.bool_), k=1)
        foreign = self.document_ids[:, :, None] != self.document_ids[:, None, :]
        mask: NDArray[np.bool_] = (future[None] | foreign)[:, None]
        return mask


class PackedText:
    """Deterministic microbatches of a text.

    The documents, each followed by an end-of-document token, form one stream. A sequence is
    ``seq_length`` tokens of it and the token that follows. A batch is a pure function of seed,
    step, microbatch and data-parallel rank, so two runs see the same text.

    Args:
        documents: the bytes of each document.
        seq_length: tokens of a sequence.
        seed: seed of the order in which sequences are drawn.

    Raises:
        ConfigError: the text is shorter than one sequence.
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
        """Pack a text file; None: the shipped text.

        Raises:
            ConfigError: the file cannot be read, or is shorter than one sequence.
        """
        return cls(read_documents(path), seq_length=seq_length, seed=seed)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the whole text, including ends of documents."""
        return len(self._stream)

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Return a sequence and the token that follows it, [s + 1], a view of the stream."""
        if not 0 <= index < self.num_sequences:
            msg = f"sequence {index} of {self.num_sequences}"
            raise IndexError(msg)
        start = index * self.seq_length
        return self._stream[start : start + self.seq_length + 1]

    def batch(
        self, step: int, microbatch: int, micro_batch_size: int, dp_rank: int = 0
    ) -> PackedBatch:
        """Draw one microbatch with replacement.

        Args:
            step: training step, from 0.
            microbatch: microbatch of the step, from 0.
            micro_batch_size: number of sequences.
            dp_rank: data-parallel rank.
        """
        rng = np.random.Generator(np.random.Philox([self.seed, step, microbatch, dp_rank]))
        indices = rng.integers(self.num_sequences, size=micro_batch_size)
        rows = np.stack([self.sequence(int(index)) for index in indices])
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
    """Return each token's distance from the first token of its document in the same row."""
    index = np.broadcast_to(np.arange(document_ids.shape[1]), document_ids.shape)
    starts = np.ones_like(document_ids, dtype=np.bool_)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
