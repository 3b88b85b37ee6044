"""Which pool each graph allocates from.

============== =============================== ======================== =======================
plan           forward of slot k               backward of slot k       safe
============== =============================== ======================== =======================
shared_backward a pool of slot k               one pool for all         yes: the default
pool_per_slot   a pool of slot k               the same pool            yes, larger
one_pool        one pool for all               the same pool            no: kept to test the proof
============== =============================== ======================== =======================

Under ``shared_backward`` nothing that a backward allocates can land in a slot's pool: its capture
allocates from scratch alone, and what it frees goes back to the slot's own pool.
"""

from __future__ import annotations

from typing import Literal

from chunkgraph.graphs import GraphBackend, Pool

__all__ = ["MemoryPlan", "PoolPlan"]

MemoryPlan = Literal["shared_backward", "pool_per_slot", "one_pool"]


class PoolPlan:
    """Hands out the pools of one capture session.

    Args:
        plan: see the module's table.
        backend: makes the pools.
        label: prefix of the pools' names.
    """

    def __init__(self, plan: MemoryPlan, backend: GraphBackend, label: str) -> None:
        self.plan = plan
        self._backend = backend
        self._label = label
        self.scratch: Pool | None = None
        if plan in ("shared_backward", "one_pool"):
            self.scratch = backend.new_pool(f"{label} scratch")
        self.slot_pools: list[Pool] = []

    def forward_pool(self, slot_label: str) -> Pool:
        """The pool for a new slot's forward; the caller keeps it."""
        if self.plan == "one_pool":
            assert self.scratch is not None
            return self.scratch
        pool = self._backend.new_pool(f"{slot_label} pool")
        self.slot_pools.append(pool)
        return pool

    def backward_pool(self, forward_pool: Pool) -> Pool:
        """The pool for the backward of the slot that got ``forward_pool``."""
        return forward_pool if self.plan == "pool_per_slot" else self._scratch()

    @property
    def pools(self) -> list[Pool]:
        """All pools handed out."""
        return [*self.slot_pools, *([self.scratch] if self.scratch else [])]

    def _scratch(self) -> Pool:
        assert self.scratch is not None
        return self.scratch
