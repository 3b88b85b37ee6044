"""Draw whole documents into microbatches, each a row of independent documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from chunkgraph.data.text import generator, read_documents
from chunkgraph.data.vocabulary import END_OF_DOCUMENT
from chunkgraph.errors import ConfigError

__all__ = ["DocumentRow", "Documents"]


@dataclass(frozen=True, eq=False)
class DocumentRow:
    """The documents of one microbatch, end to end, without padding.

    Attributes:
        tokens: tokens of all documents, [sum of lengths].
        labels: the token after each token, [sum of lengths]; the end of document after its last.
        lengths: tokens of each document.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    lengths: tuple[int, ...]

    @classmethod
    def of_documents(cls, documents: Sequence[NDArray[np.integer]]) -> DocumentRow:
        """Return the row of the tokens of these documents, in order; it may be empty."""
        lengths = tuple(len(document) for document in documents)
        tokens = np.concatenate([np.empty(0, np.int64), *documents], dtype=np.int64)
        labels = np.append(tokens[1:], END_OF_DOCUMENT)[: len(tokens)]
        labels[np.cumsum(lengths, dtype=np.int64) - 1] = END_OF_DOCUMENT
        return cls(tokens, labels, lengths)


class Documents:
    """Deterministic microbatches of whole documents.

    A document longer than a row is split into parts, and each part is a document. A row is filled
    with documents drawn with replacement as long as they fit; their number is not limited.

    Args:
        documents: the bytes of each document.
        num_tokens: tokens of a row.
        seed: seed of the order in which documents are drawn.
        multiple: documents are padded to a multiple of this many rows, which count as well; divides
            ``num_tokens``.

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
    def from_file(cls, path: str | Path | None, **options: Any) -> Self:
        """Read the documents of a text file; None: the shipped text. Options are the class's.

        Raises:
            ConfigError: the file cannot be read or is empty.
        """
        return cls(read_documents(path), **options)

    def lengths(self, step: int, microbatch: int, dp_rank: int = 0) -> tuple[int, ...]:
        """Return the length of each document of a microbatch."""
        return self.row(step, microbatch, dp_rank).lengths

    def row(self, step: int, microbatch: int, dp_rank: int = 0) -> DocumentRow:
        """Draw one microbatch.

        Args:
            step: training step, from 0.
            microbatch: microbatch of the step, from 0.
            dp_rank: data-parallel rank.
        """
        return DocumentRow.of_documents(self._draw(generator(self.seed, step, microbatch, dp_rank)))

    def _draw(self, rng: np.random.Generator) -> list[NDArray[np.uint8]]:
        """Return the documents of a microbatch."""
        drawn: list[NDArray[np.uint8]] = []
        num_free = self.num_tokens
        while True:
            part = self._parts[int(rng.integers(len(self._parts)))]
            num_free -= -(-len(part) // self._multiple) * self._multiple
            if num_free < 0:
                return drawn
            drawn.append(part)
