"""Draw whole documents into microbatches, each a row of independent documents.

Shape: T, the tokens of a row.
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
    """The next token of each token's document, [sum of lengths]; the end of document at its end."""
    lengths: tuple[int, ...]
    """Tokens of each document."""


class Documents:
    """Deterministic microbatches of whole documents.

    A document longer than a row is split into parts, and each part is a document. A row is filled
    with documents drawn with replacement as long as they fit; their number is not limited. A row is
    a pure function of seed, step, microbatch and data-parallel rank.

    Args:
        documents: the bytes of each document.
        num_tokens: T.
        seed: seed of the order in which documents are drawn.
        multiple: documents are padded to a multiple of this many rows, which count as well; divides
            T.

    Raises:
        ConfigError: there is no document of at least one byte.
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
            msg = "All documents of the text are empty. Set data.path to another text."
            raise ConfigError(msg)

    @classmethod
    def from_file(
        cls, path: str | Path | None, *, num_tokens: int, seed: int, multiple: int = 1
    ) -> Documents:
        """Read the documents of a text file; None: the shipped text.

        Raises:
            ConfigError: the file cannot be read or is empty.
        """
        return cls(read_documents(path), num_tokens=num_tokens, seed=seed, multiple=multiple)

    def lengths(self, step: int, microbatch: int, dp_rank: int = 0) -> tuple[int, ...]:
        """Return the length of each document of a microbatch, without reading its tokens."""
        return tuple(len(self._parts[i]) for i in self._draw(step, microbatch, dp_rank))

    def row(self, step: int, microbatch: int, dp_rank: int = 0) -> DocumentRow:
        """Return one microbatch.

        Args:
            step: training step, from 0.
            microbatch: microbatch of the step, from 0.
            dp_rank: data-parallel rank.
        """
        parts = [self._parts[i].astype(np.int64) for i in self._draw(step, microbatch, dp_rank)]
        end = np.array([END_OF_DOCUMENT], dtype=np.int64)
        return DocumentRow(
            tokens=np.concatenate(parts),
            labels=np.concatenate([a for part in parts for a in (part[1:], end)]),
            lengths=tuple(len(part) for part in parts),
        )

    def _draw(self, step: int, microbatch: int, dp_rank: int) -> list[int]:
        rng = np.random.Generator(np.random.Philox([self.seed, step, microbatch, dp_rank]))
        indices: list[int] = []
        num_free = self.num_tokens
        while True:
            index = int(rng.integers(len(self._parts)))
            num_free -= -(-len(self._parts[index]) // self._multiple) * self._multiple
            if num_free < 0:
                return indices
            indices.append(index)
