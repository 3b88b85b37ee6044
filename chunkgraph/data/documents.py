"""Whole documents drawn into microbatches, each a row of documents that know nothing of each other.

Shape: T tokens of a row.
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

__all__ = ["DocumentRow", "Documents"]


@dataclass(frozen=True, eq=False)
class DocumentRow:
    """The documents of one microbatch, end to end, without padding."""

    tokens: NDArray[np.int64]
    """Tokens of all documents, [sum of lengths]."""
    labels: NDArray[np.int64]
    """The token that follows each token in its document; its own last token has the end's."""
    lengths: tuple[int, ...]
    """Tokens of each document."""


class Documents:
    """Deterministic microbatches of whole documents.

    A document longer than a row is cut into parts, each a document of its own. A row is filled with
    documents drawn with replacement, as long as they fit; how many those are is not limited. It is
    a pure function of seed, step, microbatch and data-parallel rank.

    Args:
        documents: The documents' bytes.
        num_tokens: T.
        seed: Seed of the order in which documents are drawn.
        multiple: What a document's rows are padded to a multiple of, and T is one of; that padding
            takes room too.

    Raises:
        ConfigError: There is no document of at least one byte.
    """

    def __init__(
        self, documents: Sequence[bytes], *, num_tokens: int, seed: int, multiple: int = 1
    ) -> None:
        self.num_tokens = num_tokens
        self.seed = seed
        self._multiple = multiple
        self._parts = [
            np.frombuffer(document[start : start + num_tokens], dtype=np.uint8)
            for document in documents
            for start in range(0, len(document), num_tokens)
        ]
        if not self._parts:
            msg = "The text has no document with a byte in it. Set data.path to another text."
            raise ConfigError(msg)

    @classmethod
    def from_file(
        cls, path: str | Path | None, *, num_tokens: int, seed: int, multiple: int = 1
    ) -> Documents:
        """The documents of a text file; None is the shipped text.

        Raises:
            ConfigError: The file cannot be read, or holds nothing.
        """
        return cls(read_documents(path), num_tokens=num_tokens, seed=seed, multiple=multiple)

    def lengths(self, step: int, microbatch: int, dp_rank: int = 0) -> tuple[int, ...]:
        """Tokens of each document of a microbatch, without its tokens."""
        return tuple(len(self._parts[i]) for i in self._drawn(step, microbatch, dp_rank))

    def row(self, step: int, microbatch: int, dp_rank: int = 0) -> DocumentRow:
        """One microbatch.

        Args:
            step: Training step, from 0.
            microbatch: Microbatch of the step, from 0.
            dp_rank: Data-parallel rank.
        """
        parts = [self._parts[i].astype(np.int64) for i in self._drawn(step, microbatch, dp_rank)]
        end = np.array([END_OF_DOCUMENT], dtype=np.int64)
        return DocumentRow(
            tokens=np.concatenate(parts),
            labels=np.concatenate([a for part in parts for a in (part[1:], end)]),
            lengths=tuple(len(part) for part in parts),
        )

    def _drawn(self, step: int, microbatch: int, dp_rank: int) -> list[int]:
        rng = np.random.Generator(np.random.Philox([self.seed, step, microbatch, dp_rank]))
        drawn: list[int] = []
        left = self.num_tokens
        while True:
            index = int(rng.integers(len(self._parts)))
            left -= -(-len(self._parts[index]) // self._multiple) * self._multiple
            if left < 0:
                return drawn
            drawn.append(index)
