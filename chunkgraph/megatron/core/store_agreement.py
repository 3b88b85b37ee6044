"""Agreement on the host without gloo: through the store that the job's ranks met at.

For jobs whose process groups may not be gloo's (``--disable-gloo-process-groups``). A question
costs a rank three or four requests to the store, which rank 0 (or torchrun) serves. An answer that
does not come within the job's timeout is an error.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from chunkgraph.errors import WorkerError
from chunkgraph.megatron.core.gloo_agreement import Gather, Maximum, Share

__all__ = ["StoreGather", "StoreMaximum", "StoreShare"]

_uses: Counter[str] = Counter()


def _store(purpose: str) -> Any:
    """Keys of their own in the job's store; all ranks that share them ask in the same order.

    Args:
        purpose: what they are for, with the ranks that share them.
    """
    store: Any = distributed_c10d._get_default_store()
    if hasattr(store, "clone"):
        store = store.clone()  # whose waiting keeps nobody else from the store
    number = _uses[purpose]
    _uses[purpose] += 1
    return distributed_c10d.PrefixStore(f"chunkgraph/{purpose}/{number}", store)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what an error of the store means.

    Raises:
        WorkerError: a key was not set within the job's timeout, or the store has ended.
    """
    try:
        yield
    except dist.DistError as error:
        raise WorkerError(
            f"Rank {dist.get_rank()} stopped because another rank ended or did not answer in time "
            f"({str(error).splitlines()[0]})."
        ) from error


class StoreMaximum(Maximum):
    """An `EarlyAgree` without a process group: the rank that asks last computes the answer.

    Args:
        num_ranks: of the job.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(None)
        self._num_ranks = num_ranks
        self._store = _store("maximum")
        self._num_asked = 0
        self._wait: Callable[[], list[int]] = list

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Ask; the result waits for the answer."""
        self._wait()  # so that all ranks have the last answer when all have asked again
        wait = self._ask(values)
        self._wait = wait
        return wait

    @_explained()
    def _ask(self, values: Sequence[int]) -> Callable[[], list[int]]:
        store, number = self._store, self._num_asked
        self._num_asked += 1
        asked, count, agreed = (f"{number}/{name}" for name in ("asked", "count", "agreed"))
        store.append(asked, f"{' '.join(map(str, values))}\n")
        if store.add(count, 1) == self._num_ranks:
            rows = [map(int, row.split()) for row in store.get(asked).decode().splitlines()]
            store.set(agreed, " ".join(str(max(of_ranks)) for of_ranks in zip(*rows, strict=True)))
            for key in (asked, count, f"{number - 1}/agreed"):
                store.delete_key(key)

        @functools.cache
        @_explained()
        def wait() -> list[int]:
            return [int(value) for value in store.get(agreed).split()]

        return wait


class StoreShare(Share):
    """Gives the value of the first of some ranks to all of them.

    Args:
        ranks: global ones, of which this is one.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(None, ranks[0])
        self._num_readers = len(ranks) - 1
        self._store = _store(f"share/{'-'.join(map(str, ranks))}")
        self._num_shared = 0

    @_explained()
    def __call__(self, value: Any) -> Any:
        """The source's value; what the others give is not looked at."""
        store, key = self._store, str(self._num_shared)
        self._num_shared += 1
        if dist.get_rank() == self._source:
            store.set(key, pickle.dumps(value))
            return value
        data = store.get(key)
        if store.add(f"{key}/read", 1) == self._num_readers:
            store.delete_key(key)
            store.delete_key(f"{key}/read")
        return pickle.loads(data)

    def close(self) -> None:
        """There is nothing to give back."""


class StoreGather(Gather):
    """Gives every rank's value to all of some ranks.

    Args:
        ranks: global ones, of which this is one.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(None)
        self._ranks = ranks
        self._store = _store(f"gather/{'-'.join(map(str, ranks))}")
        self._num_gathered = 0

    @_explained()
    def __call__(self, value: Any) -> list[Any]:
        """The values of all, in the order of the ranks; every one of them calls."""
        store, number, me = self._store, self._num_gathered, dist.get_rank()
        self._num_gathered += 1
        store.set(f"{number}/{me}", pickle.dumps(value))
        values = [store.get(f"{number}/{rank}") for rank in self._ranks]
        # All ranks have called again, and so have read what this one gave before.
        store.delete_key(f"{number - 1}/{me}")
        return [pickle.loads(data) for data in values]

    def close(self) -> None:
        """There is nothing to give back."""
