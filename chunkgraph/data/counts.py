"""Draw microbatches whose number of documents follows a distribution, for measurements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chunkgraph.data.text import Documents
from chunkgraph.errors import ConfigError

__all__ = ["COUNT_SHARES", "DrawnDocuments", "check_counts", "count_at"]

COUNT_SHARES = (0.5, 0.9, 0.99, 1.0)
"""The shares of the quantiles: 50%, 90%, 99% and 100% of all microbatches."""


def check_counts(counts: Sequence[int], where: str = "The document counts") -> None:
    """Check that counts are quantiles.

    Args:
        counts: for each of `COUNT_SHARES`, the documents that this share of microbatches does not
            exceed.
        where: the beginning of the error message.

    Raises:
        ConfigError: the number of counts is wrong, they decrease, or one is below 1.
    """
    if len(counts) != len(COUNT_SHARES) or list(counts) != sorted(counts) or min(counts) < 1:
        msg = (
            f"{where}: {list(counts)}; expected four numbers of at least 1 that do not decrease: "
            "the documents that 50%, 90%, 99% and 100% of the microbatches do not exceed."
        )
        raise ConfigError(msg)


def count_at(counts: Sequence[int], share: float) -> int:
    """Return the quantile of a share: the documents that this share of microbatches do not exceed.

    Interpolates the logarithm of the count linearly between the known quantiles, from 1 document at
    share 0, and rounds up, so the known quantiles come out unchanged.

    Args:
        counts: as in `check_counts`.
        share: 0 to 1.
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
        documents: the bytes of each document of the text.
        counts: quantiles of the number of documents, see `check_counts`.
        num_tokens: tokens of a row.
        seed: the seed of all draws.
        multiple: documents are padded to a multiple of this many rows; divides ``num_tokens``.

    Raises:
        ConfigError: the quantiles are invalid, or the documents have no room.
    """

    def __init__(
        self,
        documents: Sequence[bytes],
        *,
        counts: Sequence[int],
        num_tokens: int,
        seed: int,
        multiple: int = 1,
    ) -> None:
        check_counts(counts)
        if counts[-1] * multiple > num_tokens:
            each = f" of at least {multiple} rows each" if multiple > 1 else ""
            msg = f"{counts[-1]} documents{each} do not fit in {num_tokens} tokens."
            raise ConfigError(msg)
        super().__init__(documents, num_tokens=num_tokens, seed=seed, multiple=multiple)
        self._text = np.frombuffer(b"\n\n".join(documents), dtype=np.uint8)
        self._counts = counts

    def _draw(self, rng: np.random.Generator) -> list[NDArray[np.uint8]]:
        count = count_at(self._counts, float(rng.random()))
        multiple = self._multiple
        ends = np.sort(1 + rng.choice(self.num_tokens // multiple, size=count, replace=False))
        lengths: NDArray[np.int64] = (ends - np.append(0, ends[:-1])) * multiple
        if multiple > 1:
            lengths -= rng.integers(multiple, size=count)
        starts = rng.integers(len(self._text), size=count)
        return [
            self._text.take(np.arange(start, start + length), mode="wrap")
            for start, length in zip(starts, lengths, strict=True)
        ]
