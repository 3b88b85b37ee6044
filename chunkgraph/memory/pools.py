"""Which pool each graph allocates from.

================== =========================== ======================== =========================
plan               forward of slot k           backward of slot k       safe
================== =========================== ======================== =========================
shared_temporaries what the backward needs in  the same one pool for    yes, the smallest
                   a pool of slot k, the rest  all
                   in one pool for all
shared_backward    a pool of slot k            one pool for all         yes
pool_per_slot      a pool of slot k            the same pool            yes, the largest
one_pool           one pool for all            the same pool            no: to test the proof
================== =========================== ======================== =========================

Under the first two nothing that a backward allocates can land in a slot's pool: its capture
allocates from scratch alone, and what it frees goes back to the slot's own pool. Under
``shared_temporaries`` a forward's input gradients are valid until the next replay of any graph.

A rank with one slot in all (no pipeline, or the last stage of one) has nothing to keep apart: there
both become ``pool_per_slot``, whose backward reuses what its forward frees, as an eager pass does.
"""

from __future__ import annotations

from typing import Literal

from chunkgraph.graphs import GraphBackend, OperatorTrace, Pool, ScratchRouter

__all__ = ["MemoryPlan", "PoolPlan", "plan_for_slots"]

MemoryPlan = Literal["shared_temporaries", "shared_backward", "pool_per_slot", "one_pool"]


def plan_for_slots(plan: MemoryPlan, num_slots: int) -> MemoryPlan:
    """The plan that takes the least memory and keeps the promises of ``plan``.

    Args:
        plan: the requested plan.
        num_slots: of all chunks of the rank together.
    """
    if num_slots == 1 and plan in ("shared_temporaries", "shared_backward"):
        return "pool_per_slot"
    return plan


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
        if plan != "pool_per_slot":
            self.scratch = backend.new_pool(f"{label} scratch")
        self.slot_pools: list[Pool] = []

    def forward_pool(self, slot_label: str, num_bytes: int = 0) -> Pool:
        """The pool for a new slot's forward; the caller keeps it.

        Args:
            slot_label: names the slot in errors.
            num_bytes: what the forward keeps for its backward, taken ahead; 0 where unknown.
        """
        if self.plan == "one_pool":
            assert self.scratch is not None
            return self.scratch
        pool = self._backend.new_pool(f"{slot_label} pool")
        pool.reserve(num_bytes)
        self.slot_pools.append(pool)
        return pool

    def router(self, trace: OperatorTrace | None) -> ScratchRouter | None:
        """What sends a forward's temporaries to scratch, where the plan wants it.

        Args:
            trace: of the forward; None where it was not watched.
        """
        if trace is None or self.plan != "shared_temporaries":
            return None
        return ScratchRouter(self._scratch(), trace)

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
