"""Draw microbatches whose number of documents follows a distribution, for measurements.

Shape: T, the tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chunkgraph.data.counts import check_counts, count_at
from chunkgraph.data.documents import DocumentRow
from chunkgraph.data.text import read_documents
from chunkgraph.data.vocabulary import END_OF_DOCUMENT
from chunkgraph.errors import ConfigError

__all__ = ["DrawnDocuments"]


class DrawnDocuments:
    """Deterministic microbatches of documents whose number follows a distribution.

    A microbatch of n documents ends them at n random positions of its row; the rest of the row
    stays empty, about as long as a document. So rows are as full as those of a data path that ends
    a microbatch before the first document that does not fit. A document's tokens are a stretch of
    the text from a random position. Everything is a pure function of seed, step, microbatch and
    data-parallel rank.

    Args:
        text: the bytes of the text.
        counts: quantiles of the number of documents, see `check_counts`.
        num_tokens: T.
        seed: the seed of all draws.
        multiple: documents are padded to a multiple of this many rows; divides T.

    Raises:
        ConfigError: the text is empty, the quantiles are invalid, or the documents have no room.
    """

    def __init__(
        self,
        text: bytes,
        counts: Sequence[int],
        *,
        num_tokens: int,
        seed: int,
        multiple: int = 1,
    ) -> None:
        check_counts(counts)
        if not text:
            msg = "The text is empty. Set data.path to another one."
            raise ConfigError(msg)
        if counts[-1] * multiple > num_tokens:
            each = f" of at least {multiple} rows each" if multiple > 1 else ""
            msg = f"{counts[-1]} documents{each} do not fit in {num_tokens} tokens."
            raise ConfigError(msg)
        self.num_tokens = num_tokens
        self._multiple = multiple
        self.seed = seed
        self._counts = tuple(counts)
        self._text = np.frombuffer(text, dtype=np.uint8)

    @classmethod
    def from_file(
        cls,
        path: str | Path | None,
        counts: Sequence[int],
        *,
        num_tokens: int,
        seed: int,
        multiple: int = 1,
    ) -> DrawnDocuments:
        """Draw from a text file; None: the shipped text.

        Raises:
            ConfigError: the file cannot be read, or as for the class.
        """
        text = b"\n\n".join(read_documents(path))
        return cls(text, counts, num_tokens=num_tokens, seed=seed, multiple=multiple)

    def lengths(self, step: int, microbatch: int, dp_rank: int = 0) -> tuple[int, ...]:
        """Return the length of each document of a microbatch, without reading its tokens."""
        return tuple(self._lengths(self._generator(step, microbatch, dp_rank)).tolist())

    def row(self, step: int, microbatch: int, dp_rank: int = 0) -> DocumentRow:
        """Return one microbatch.

        Args:
            step: training step, from 0.
            microbatch: microbatch of the step, from 0.
            dp_rank: data-parallel rank.
        """
        rng = self._generator(step, microbatch, dp_rank)
        lengths = self._lengths(rng)
        starts = rng.integers(len(self._text), size=len(lengths))
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
        tokens = self._text.take(places, mode="wrap").astype(np.int64)
        labels = np.append(tokens[1:], END_OF_DOCUMENT)
        labels[ends - 1] = END_OF_DOCUMENT
        return DocumentRow(tokens=tokens, labels=labels, lengths=tuple(lengths.tolist()))

    def _generator(self, step: int, microbatch: int, dp_rank: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox([self.seed, step, microbatch, dp_rank]))

    def _lengths(self, rng: np.random.Generator) -> NDArray[np.int64]:
        count = count_at(self._counts, float(rng.random()))
        multiple = self._multiple
        cuts = 1 + rng.choice(self.num_tokens // multiple, size=count, replace=False)
        ends = np.sort(cuts)
        lengths: NDArray[np.int64] = ends - np.concatenate([[0], ends[:-1]])
        if multiple == 1:
            return lengths
        return lengths * multiple - rng.integers(multiple, size=count)
