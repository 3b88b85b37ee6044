"""The pool that each graph of a rank allocates from.

=============== ======================= ========================
rank with       forward of slot k       backward of slot k
=============== ======================= ========================
several slots   a pool of slot k        scratch: one pool of all
one slot        a pool of slot k        the same pool
=============== ======================= ========================

The input half of a split backward allocates from the pool of slot k, where it leaves memory for the
weight half, which allocates as a whole backward does.

With scratch the capture of a backward only frees memory in its slot's pool. A rank with a single
slot (no pipeline, or its last stage) has nothing to separate: its backward reuses memory that the
forward frees, like an eager pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from chunkgraph.errors import CaptureError
from chunkgraph.graphs import Allocation, GraphBackend, Pool, block_bytes


class PoolPlan:
    """Create the pools of one capture session.

    Args:
        backend: Backend that creates the pools.
        label: Prefix of the pools' names.
        idle: Plans of graphs that are replayed in other steps; their memory is dead in the steps of
            this session. Their pools serve first, in the order scratch, last slot, to first slot.
        has_scratch: Whether backwards share a pool, as on a rank with several slots.

    Attributes:
        scratch: The pool that all backwards share; None: they use those of the slots.
        static: The pool of the inputs and gradients that graphs read; None: they never sleep.
        slot_pools: The pools of the slots.
    """

    def __init__(
        self,
        backend: GraphBackend,
        label: str,
        idle: Sequence[PoolPlan] = (),
        *,
        has_scratch: bool,
    ) -> None:
        self._backend = backend
        self._idle = deque(distinct(pool for other in idle for pool in reversed(other.pools)))
        self.scratch = self._new_pool(f"{label} scratch") if has_scratch else None
        self.static = backend.new_pool(f"{label} inputs") if backend.can_sleep else None
        self.slot_pools: list[Pool] = []

    def _new_pool(self, label: str) -> Pool:
        return self._idle.popleft() if self._idle else self._backend.new_pool(label)

    @property
    def next_idle(self) -> Pool | None:
        """Return the pool of the next slot if its memory is dead now, and can sleep."""
        return self._idle[0] if self._idle and self._backend.can_sleep else None

    def forward_pool(
        self, slot_label: str, num_bytes: int = 0, allocations: Sequence[Sequence[Allocation]] = ()
    ) -> Pool:
        """Return the pool for a new slot's forward.

        Args:
            slot_label: Name of the slot in errors.
            num_bytes: Bytes to reserve for the forward in one block; 0 if unknown.
            allocations: See `Pool.reserve`.
        """
        pool = self._new_pool(f"{slot_label} pool")
        pool.reserve(num_bytes, allocations)
        self.slot_pools.append(pool)
        return pool

    def reserve_scratch(self, allocations: Sequence[Sequence[Allocation]]) -> None:
        """Reserve the pool that all backwards share, if there is one, for each of these works."""
        if self.scratch is not None:
            self.scratch.reserve(max(map(block_bytes, allocations)), allocations)

    def backward_pool(self, forward_pool: Pool) -> Pool:
        """Return the pool for the backward of the slot whose forward uses ``forward_pool``."""
        return forward_pool if self.scratch is None else self.scratch

    @property
    def pools(self) -> list[Pool]:
        """Return all pools that graphs of the session allocate from."""
        return [*self.slot_pools, *([self.scratch] if self.scratch else [])]

    def refuse_in_use(self) -> None:
        """Refuse memory that others use after a session, if a sleep would lose it.

        Raises:
            CaptureError: something uses memory of a pool.
        """
        for pool in self.pools if self._backend.can_sleep else ():
            if live := pool.live():
                raise CaptureError(
                    f"{live.num_bytes} bytes of {pool.label} are still in use after the capture, "
                    "and sleep() would lose them: a library keeps a workspace or a table that it "
                    "created in the capture. Let it create them in the first eager call, or leave "
                    "out can_sleep."
                )

    @property
    def every(self) -> list[Pool]:
        """Return all pools of the session."""
        return [*self.pools, *([self.static] if self.static else [])]


def wake(pools: Sequence[Pool], backend: GraphBackend, label: str) -> None:
    """Get memory for the same addresses again.

    Args:
        pools: The pools, which sleep.
        backend: Their backend.
        label: Name of the rank, or of the memory, in errors.

    Raises:
        torch.OutOfMemoryError: too little is free; all pools still sleep.
    """
    try:
        for pool in pools:
            pool.wake()
    except RuntimeError as error:
        for pool in pools:
            pool.sleep()
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        needed, free = sum(p.reserved_bytes for p in pools), backend.free_bytes() or 0
        raise torch.OutOfMemoryError(
            f"{label}: waking needs {needed / 2**20:.0f} MiB, but only {free / 2**20:.0f} MiB of "
            f"{backend.device} are free. The memory still sleeps.\n  To do: free memory, such as "
            "that of an inference engine in this or another process, and call wake() again; or "
            "release() graphs."
        ) from error


def distinct(pools: Iterable[Pool]) -> list[Pool]:
    """Return each pool once, in order: graphs of other steps may share one."""
    return list({id(pool): pool for pool in pools}.values())
