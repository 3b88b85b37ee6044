"""Draw microbatches whose number of documents follows a distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkgraph.data import Documents
from chunkgraph.errors import ConfigError

COUNT_SHARES = (0.5, 0.9, 0.99, 1.0)
"""The shares of the quantiles: 50%, 90%, 99% and 100% of all microbatches."""


def count_at(counts: Sequence[int], share: float) -> int:
    """Return the number of documents that a share of the microbatches, 0 to 1, does not exceed.

    Interpolates the logarithm of the count linearly between ``counts``, the quantiles of
    `COUNT_SHARES`, from 1 document at share 0, and rounds up: the quantiles come out unchanged.
    """
    exact = np.exp(np.interp(share, (0, *COUNT_SHARES), np.log((1, *counts))))
    # Ignore rounding errors of up to 1 in 10^9.
    return int(np.ceil(exact * (1 - 1e-9)))


class DrawnDocuments(Documents):
    """Deterministic microbatches of documents whose number follows a distribution.

    A microbatch of n documents ends them at n random positions of its row; the rest of the row
    stays empty, about as long as a document. So rows are as full as those of a data path that ends
    a microbatch before the first document that does not fit. A document's tokens are a stretch of
    the text from a random position.

    Args:
        documents: The bytes of each document of the text.
        counts: For each of `COUNT_SHARES`, the documents that this share of microbatches does not
            exceed.
        options: Options of `Documents`.

    Raises:
        ConfigError: The documents have no room in a row.
    """

    def __init__(
        self, documents: Sequence[bytes], *, counts: Sequence[int], **options: Any
    ) -> None:
        super().__init__(documents, **options)
        if counts[-1] * self.multiple > self.num_tokens:
            raise ConfigError(
                f"{counts[-1]} documents of at least {self.multiple} rows each do not fit in "
                f"{self.num_tokens} rows. Lower the last number of --document-counts."
            )
        self._text = np.frombuffer(b"\n\n".join(documents), dtype=np.uint8)
        self._counts = counts

    def draw(self, rng: np.random.Generator) -> list[NDArray[np.uint8]]:
        """Return the documents of a microbatch."""
        count = count_at(self._counts, float(rng.random()))
        multiple = self.multiple
        ends = np.sort(1 + rng.choice(self.num_tokens // multiple, size=count, replace=False))
        lengths: NDArray[np.int64] = (ends - np.append(0, ends[:-1])) * multiple
        if multiple > 1:
            lengths -= rng.integers(multiple, size=count)
        starts = rng.integers(len(self._text), size=count)
        return [
            self._text.take(np.arange(start, start + length), mode="wrap")
            for start, length in zip(starts, lengths, strict=True)
        ]
