"""Agreement on the host without gloo: through the store that the job's ranks met at.

For jobs whose process groups may not be gloo's (``--disable-gloo-process-groups``). A question
costs a rank three or four requests to the store, which rank 0 (or torchrun) serves. An answer that
does not come within the job's timeout is an error.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from chunkgraph.errors import WorkerError
from chunkgraph.megatron.topology import Gather, Maximum, Share

__all__ = ["StoreGather", "StoreMaximum", "StoreShare"]

_uses: Counter[str] = Counter()


class _Keys:
    """Keys of one object in the job's store; every rank makes its objects in the same order.

    Args:
        purpose: of the object, with the ranks that share it.
    """

    def __init__(self, purpose: str) -> None:
        store: Any = distributed_c10d._get_default_store()
        if hasattr(store, "clone"):
            store = store.clone()  # whose waiting keeps nobody else from the store
        self.store: Any = distributed_c10d.PrefixStore(
            f"chunkgraph/{purpose}/{_uses[purpose]}", store
        )
        _uses[purpose] += 1

    def wait_for(self, *keys: str) -> list[bytes]:
        """The values of keys that other ranks set.

        Raises:
            WorkerError: they did not within the job's timeout.
        """
        try:
            return [self.store.get(key) for key in keys]
        except dist.DistStoreError as error:
            raise WorkerError(
                f"Rank {dist.get_rank()} stopped because another rank did not answer in time: it "
                f"ended or hangs ({str(error).splitlines()[0]})."
            ) from error


class StoreMaximum(Maximum):
    """An `EarlyAgree` without a process group: the rank that asks last computes the answer.

    Args:
        num_ranks: of the job.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(None)
        self._num_ranks = num_ranks
        self._keys = _Keys("maximum")
        self._num_asked = 0
        self._wait: Callable[[], list[int]] = list

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Ask; the result waits for the answer."""
        self._wait()  # so that all ranks have the last answer when all have asked again
        store, number = self._keys.store, self._num_asked
        self._num_asked += 1
        asked, count, agreed = (f"{number}/{name}" for name in ("asked", "count", "agreed"))
        store.append(asked, f"{' '.join(map(str, values))}\n")
        if store.add(count, 1) == self._num_ranks:
            rows = [map(int, row.split()) for row in store.get(asked).decode().splitlines()]
            store.set(agreed, " ".join(str(max(of_ranks)) for of_ranks in zip(*rows, strict=True)))
            for key in (asked, count, f"{number - 1}/agreed"):
                store.delete_key(key)
        answer: list[int] | None = None

        def wait() -> list[int]:
            nonlocal answer
            if answer is None:
                (text,) = self._keys.wait_for(agreed)
                answer = [int(value) for value in text.split()]
            return answer

        self._wait = wait
        return wait


class StoreShare(Share):
    """Gives the value of the first of some ranks to all of them.

    Args:
        ranks: global ones, of which this is one.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(None, ranks[0])
        self._num_readers = len(ranks) - 1
        self._keys = _Keys(f"share/{'-'.join(map(str, ranks))}")
        self._num_shared = 0

    def __call__(self, value: Any) -> Any:
        """The source's value; what the others give is not looked at."""
        store, key = self._keys.store, str(self._num_shared)
        self._num_shared += 1
        if dist.get_rank() == self._source:
            store.set(key, pickle.dumps(value))
            return value
        (data,) = self._keys.wait_for(key)
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
        self._keys = _Keys(f"gather/{'-'.join(map(str, ranks))}")
        self._num_gathered = 0

    def __call__(self, value: Any) -> list[Any]:
        """The values of all, in the order of the ranks; every one of them calls."""
        store, number, me = self._keys.store, self._num_gathered, dist.get_rank()
        self._num_gathered += 1
        store.set(f"{number}/{me}", pickle.dumps(value))
        values = self._keys.wait_for(*(f"{number}/{rank}" for rank in self._ranks))
        # All ranks have called again, and so have read what this one gave before.
        store.delete_key(f"{number - 1}/{me}")
        return [pickle.loads(data) for data in values]

    def close(self) -> None:
        """There is nothing to give back."""
