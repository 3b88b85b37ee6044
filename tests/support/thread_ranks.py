"""Threads that stand for ranks, and agree on element-wise maxima as through a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Agreeing:
    """An agreement of ``num_ranks`` threads; one that waits alone for a minute raises an error."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=60)
        self._values: list[Sequence[int]] = [()] * num_ranks

    def rank(self, rank: int) -> Callable[[Sequence[int]], list[int]]:
        """Return the agreement as one rank calls it."""

        def agree(values: Sequence[int]) -> list[int]:
            self._values[rank] = list(values)
            self._barrier.wait()
            maxima = [max(column) for column in zip(*self._values, strict=True)]
            self._barrier.wait()
            return maxima

        return agree


def run_ranks(num_ranks: int, main: Callable[[int], None]) -> None:
    """Run ``main(rank)`` in a thread for each rank; raise what a rank raised."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            main(rank)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
