"""How many documents a microbatch holds, drawn from a distribution that is known by quantiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chunkgraph.errors import ConfigError

__all__ = ["COUNT_SHARES", "check_counts", "count_at", "share_above"]

COUNT_SHARES = (0.5, 0.9, 0.99, 1.0)
"""The shares of all microbatches that have at most so many documents."""


def check_counts(counts: Sequence[int], where: str = "The document counts") -> None:
    """Refuse what are no quantiles.

    Args:
        counts: the most documents of a microbatch among each of `COUNT_SHARES`.
        where: what a message begins with.

    Raises:
        ConfigError: there are not as many as shares, or they fall, or one is below 1.
    """
    if len(counts) != len(COUNT_SHARES) or list(counts) != sorted(counts) or min(counts) < 1:
        msg = (
            f"{where}: {list(counts)}; expected four numbers of at least 1 that do not fall: the "
            "documents that 50%, 90%, 99% and all microbatches do not exceed."
        )
        raise ConfigError(msg)


def count_at(counts: Sequence[int], share: float) -> int:
    """The documents that a share of all microbatches does not exceed: a quantile.

    Between the known ones the logarithm of the count is interpolated linearly, from 1 document at
    share 0; the result is rounded up, so that the known ones come out as they are.

    Args:
        counts: as in `check_counts`.
        share: 0 to 1.
    """
    below, least = 0.0, 1
    for known, most in zip(COUNT_SHARES, counts, strict=True):
        if share <= known:
            part = (share - below) / (known - below)
            exact = math.exp(math.log(least) + part * math.log(most / least))
            # 1 part in 10^9 is rounding.
            return min(most, max(1, math.ceil(exact * (1 - 1e-9))))
        below, least = known, most
    return counts[-1]


def share_above(counts: Sequence[int], limit: int) -> float:
    """The share of microbatches with more than ``limit`` documents; the inverse of `count_at`."""
    below, least = 0.0, 1
    for known, most in zip(COUNT_SHARES, counts, strict=True):
        if limit < most:
            if limit < least:
                return 1.0 - below
            return 1.0 - below - (known - below) * math.log(limit / least) / math.log(most / least)
        below, least = known, most
    return 0.0
