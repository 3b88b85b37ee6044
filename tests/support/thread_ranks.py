"""Threads that stand for ranks, and agree on element-wise maxima as through a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Agreeing:
    """An agreement of ``num_ranks`` threads; like a process group's, their calls pair up by number.

    A thread that waits alone for a minute raises an error.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.calls: list[dict[int, list[int]]] = []
        self.changed = threading.Condition()

    def rank(self, rank: int) -> Callable[[Sequence[int]], list[int]]:
        """Return the agreement as one rank calls it."""
        return Starting(self, rank).__call__


class Starting:
    """The agreement of one rank, which can also ask before it needs the answer."""

    def __init__(self, group: Agreeing, rank: int) -> None:
        self.group, self.rank, self.num_questions = group, rank, 0

    def __call__(self, values: Sequence[int]) -> list[int]:
        return self.start(values)()

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Ask; return a function that waits for the answer."""
        group, number = self.group, self.num_questions
        self.num_questions += 1
        with group.changed:
            while len(group.calls) <= number:
                group.calls.append({})
            group.calls[number][self.rank] = list(values)
            group.changed.notify_all()

        def wait() -> list[int]:
            with group.changed:
                is_whole = lambda: len(group.calls[number]) == group.num_ranks  # noqa: E731
                assert group.changed.wait_for(is_whole, timeout=60), "a rank waits for ever"
                columns = zip(*group.calls[number].values(), strict=True)
                return [max(column) for column in columns]

        return wait


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
