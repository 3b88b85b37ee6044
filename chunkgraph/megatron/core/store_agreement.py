"""Agree on the host without gloo, through the job's rendezvous store.

For jobs that may not use gloo groups (``--disable-gloo-process-groups``). Each agreement costs a
rank three or four requests to the store, which rank 0 (or torchrun) serves. It is an error if a
rank does not answer within the job's timeout.
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

from chunkgraph.engine.decide.maximum import Maximum
from chunkgraph.errors import WorkerError
from chunkgraph.megatron.core.gloo_agreement import Gather, Share

__all__ = ["StoreGather", "StoreMaximum", "StoreShare"]

_uses: Counter[str] = Counter()


def _store(purpose: str) -> Any:
    """Return a private key space in the job's store.

    The n-th call with a purpose returns the same key space on all ranks.

    Args:
        purpose: The use of the keys, including the ranks that share them.
    """
    store: Any = distributed_c10d._get_default_store()
    if hasattr(store, "clone"):
        store = store.clone()  # a clone that waits does not block other users of the store
    number = _uses[purpose]
    _uses[purpose] += 1
    return distributed_c10d.PrefixStore(f"chunkgraph/{purpose}/{number}", store)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn an error of the store into one that explains it.

    Raises:
        WorkerError: A key was not set within the job's timeout, or the store has ended.
    """
    try:
        yield
    except dist.DistError as error:
        raise WorkerError(
            f"Rank {dist.get_rank()} stopped because another rank ended or did not answer in time "
            f"({str(error).splitlines()[0]})."
        ) from error


class StoreMaximum(Maximum):
    """Compute an element-wise maximum through the store: the last rank to post computes it.

    Implements `EarlyAgree` without a process group.

    Args:
        num_ranks: Number of ranks in the job.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(None)
        self._num_ranks = num_ranks
        self._store = _store("maximum")
        self._num_rounds = 0
        self._wait: Callable[[], list[int]] = list

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Post the values; return a function that waits for the maximum."""
        self._wait()  # when all ranks have posted again, all have read the last maximum
        wait = self._post(values)
        self._wait = wait
        return wait

    @_explained()
    def _post(self, values: Sequence[int]) -> Callable[[], list[int]]:
        store, number = self._store, self._num_rounds
        self._num_rounds += 1
        posted, count, maximum = (f"{number}/{name}" for name in ("posted", "count", "maximum"))
        store.append(posted, f"{' '.join(map(str, values))}\n")
        if store.add(count, 1) == self._num_ranks:
            rows = [map(int, row.split()) for row in store.get(posted).decode().splitlines()]
            store.set(maximum, " ".join(str(max(column)) for column in zip(*rows, strict=True)))
            for key in (posted, count, f"{number - 1}/maximum"):
                store.delete_key(key)

        @functools.cache
        @_explained()
        def wait() -> list[int]:
            return [int(value) for value in store.get(maximum).split()]

        return wait


class StoreShare(Share):
    """Broadcast the value of the first of ``ranks`` to all of them, through the store.

    Args:
        ranks: Global ranks, including this one.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(None, ranks[0])
        self._num_readers = len(ranks) - 1
        self._store = _store(f"share/{'-'.join(map(str, ranks))}")
        self._num_shared = 0

    @_explained()
    def __call__(self, value: Any) -> Any:
        """Return the source's value; the arguments of the other ranks are ignored."""
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
        """Do nothing: there is no group to destroy."""


class StoreGather(Gather):
    """Gather one value of every rank on all of ``ranks``, through the store.

    Args:
        ranks: Global ranks, including this one.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(None)
        self._ranks = ranks
        self._store = _store(f"gather/{'-'.join(map(str, ranks))}")
        self._num_gathered = 0

    @_explained()
    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ``ranks``; every rank must call this."""
        store, number, this_rank = self._store, self._num_gathered, dist.get_rank()
        self._num_gathered += 1
        store.set(f"{number}/{this_rank}", pickle.dumps(value))
        values = [store.get(f"{number}/{rank}") for rank in self._ranks]
        # All ranks have called again, so all have read this rank's last value.
        store.delete_key(f"{number - 1}/{this_rank}")
        return [pickle.loads(data) for data in values]

    def close(self) -> None:
        """Do nothing: there is no group to destroy."""
