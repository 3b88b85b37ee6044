"""The number of documents of a microbatch, as a distribution described by quantiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chunkgraph.errors import ConfigError

__all__ = ["COUNT_SHARES", "check_counts", "count_at"]

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
    low_share, low = 0.0, 1
    for high_share, high in zip(COUNT_SHARES, counts, strict=True):
        if share <= high_share:
            part = (share - low_share) / (high_share - low_share)
            exact = math.exp(math.log(low) + part * math.log(high / low))
            # Ignore rounding errors of up to 1 in 10^9.
            return min(high, max(1, math.ceil(exact * (1 - 1e-9))))
        low_share, low = high_share, high
    return counts[-1]
