"""Let ranks agree on the host: over gloo, or through the job's store where gloo is turned off.

Jobs with ``--disable-gloo-process-groups`` use the rendezvous store. Each agreement costs a rank
three or four requests to it, whatever the number of ranks; rank 0 (or torchrun) serves them. It is
an error if a rank does not answer within the job's timeout.

Values travel in torch's format for tensors and plain Python values, whose reader runs no code.
"""

from __future__ import annotations

import functools
import io
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from chunkgraph.engine.agreement import Maximum, ask_store, lost_ranks_named, new_group
from chunkgraph.megatron.core.access import import_megatron

_HEADER = struct.Struct(">II")  # of a posted value: the rank's place and the number of bytes
_uses: Counter[str] = Counter()


def uses_gloo() -> bool:
    """Return whether Megatron may use gloo: ``--disable-gloo-process-groups`` is not set."""
    state = import_megatron("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        return True
    try:
        return state.get_data_parallel_group_gloo() is not None
    except AssertionError:
        return False


def agree_by_maximum() -> Maximum | None:
    """Return an element-wise maximum over all ranks; None for a single process.

    Creates a gloo group, so every rank must call this in the same order relative to its other
    process groups.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if uses_gloo():
        make = functools.partial(new_group, backend="gloo")
        return Maximum(make(), make)
    return StoreMaximum(range(dist.get_world_size()))


def exchange_between(group: Any) -> Exchange | None:
    """Return the exchange of the ranks of a process group; None for a group of one rank.

    Creates a gloo group, so all of these ranks must call this.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return None
    if uses_gloo():
        own = new_group(ranks, backend="gloo", use_local_synchronization=True)
        return Exchange(functools.partial(_gathered_by_gloo, own), own)
    posts = _Posts("exchange", ranks)
    return Exchange(lambda data: _parts(posts.post(data, bytes)()))


class Exchange:
    """Exchange values between some ranks. All of them must call the same methods in one order.

    A value consists of tensors, plain Python values, and lists, tuples and dicts of these.

    Args:
        gather: Returns the bytes of all ranks, in the order of the ranks, from this rank's.
        group: A process group that this object owns, if any.
    """

    def __init__(self, gather: Callable[[bytes], list[bytes]], group: Any = None) -> None:
        self._gather, self._group = gather, group

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks."""
        stream = io.BytesIO()
        torch.save(value, stream)
        parts = map(io.BytesIO, self._gather(stream.getvalue()))
        return [torch.load(part, map_location="cpu", weights_only=True) for part in parts]

    def share(self, value: Any) -> Any:
        """Return the first rank's value; the arguments of the others are ignored."""
        return self.gather(value)[0]

    def close(self) -> None:
        """Destroy the process group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


class StoreMaximum(Maximum):
    """Compute an element-wise maximum through the store; also ahead of time.

    Args:
        ranks: All ranks of the job.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(None)
        self._posts = _Posts("maximum", ranks)

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Post the values; return a function that waits for the maximum."""
        wait = self._posts.post(" ".join(map(str, values)).encode(), _largest)
        return lambda: [int(value) for value in wait().split()]


class _Posts:
    """Values that ranks post to the store; the last rank to post writes the result.

    The n-th object with one purpose and these ranks uses the same keys on all of them.

    Args:
        purpose: The use of the keys.
        ranks: Global ranks, including this one.
    """

    def __init__(self, purpose: str, ranks: Sequence[int]) -> None:
        store: Any = distributed_c10d._get_default_store()
        if hasattr(store, "clone"):
            # A clone that waits does not block other users of the store.
            store = ask_store(store.clone, store.timeout)
        name = f"{purpose}/{'-'.join(map(str, ranks))}"
        self._store: Any = distributed_c10d.PrefixStore(f"chunkgraph/{name}/{_uses[name]}", store)
        _uses[name] += 1
        self._limit = store.timeout
        self._num_ranks, self._place = len(ranks), [*ranks].index(dist.get_rank())
        self._num_rounds = 0
        self._wait: Callable[[], bytes] = bytes

    def post(self, data: bytes, combine: Callable[[bytes], bytes]) -> Callable[[], bytes]:
        """Post ``data``; return a function that waits for the result.

        ``combine`` computes the result from the posted values, each after a header.
        """
        self._wait()  # when all ranks have posted again, all have read the last result
        store, number = self._store, self._num_rounds
        self._num_rounds += 1
        posted, count, result = (f"{number}/{name}" for name in ("posted", "count", "result"))

        def put() -> None:
            store.append(posted, _HEADER.pack(self._place, len(data)) + data)
            if store.add(count, 1) == self._num_ranks:
                store.set(result, combine(store.get(posted)))
                for key in (posted, count, f"{number - 1}/result"):
                    store.delete_key(key)

        @functools.cache
        @lost_ranks_named()
        def wait() -> bytes:
            return bytes(ask_store(lambda: store.get(result), self._limit))

        with lost_ranks_named():
            ask_store(put, self._limit)
        self._wait = wait
        return wait


def _largest(posted: bytes) -> bytes:
    rows = [map(int, data.split()) for data in _parts(posted)]
    return " ".join(str(max(column)) for column in zip(*rows, strict=True)).encode()


def _parts(posted: bytes) -> list[bytes]:
    """Return posted values in the order of the ranks."""
    parts: dict[int, bytes] = {}
    begin = 0
    while begin < len(posted):
        place, size = _HEADER.unpack_from(posted, begin)
        begin += _HEADER.size + size
        parts[place] = posted[begin - size : begin]
    return [parts[place] for place in sorted(parts)]


def _gathered_by_gloo(group: Any, data: bytes) -> list[bytes]:
    cpu = torch.device("cpu")
    sizes = [torch.zeros(1, dtype=torch.int64, device=cpu) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=cpu), group=group)
    most = max(int(size) for size in sizes)
    mine = torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8)
    whole = [torch.empty(most, dtype=torch.uint8, device=cpu) for _ in sizes]
    dist.all_gather(whole, mine, group=group)
    pairs = zip(whole, sizes, strict=True)
    return [tensor[: int(size)].numpy().tobytes() for tensor, size in pairs]


_NAME = "destroy_process_group"


def before_groups_end(done: Callable[[], None], *, of_any: bool = False) -> Callable[[], None]:
    """Call a method before all process groups are destroyed, or before any is.

    NCCL does not destroy a communicator while a CUDA graph contains its collectives: it waits for
    the graph to be freed, without a time limit. So `torch.distributed.destroy_process_group` at the
    end of a script hangs if graphs are still alive.

    It is not called by code that imported ``destroy_process_group`` from ``torch.distributed``
    earlier.

    Args:
        done: A bound method. Its object is referenced weakly. If it raises, the groups stay.
        of_any: Whether to call it when a single group is destroyed, too.

    Returns:
        A function that removes the callback.
    """
    method = weakref.WeakMethod(done)
    replaced: list[tuple[Any, Any, Any]] = []

    def calling(original: Any) -> Any:
        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> None:
            call = method()
            if call is not None and (of_any or group in (None, dist.GroupMember.WORLD)):
                call()
            original(group)

        return destroy_process_group

    def remove() -> None:
        for module, original, replacement in replaced:
            if getattr(module, _NAME) is replacement:  # else other code has wrapped it
                setattr(module, _NAME, original)

    for module in (dist, dist.distributed_c10d):
        original = getattr(module, _NAME)
        replaced.append((module, original, calling(original)))
        setattr(module, _NAME, replaced[-1][2])
    return remove
