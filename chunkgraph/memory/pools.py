"""Memory plans: the pool that each graph allocates from.

================== =========================== ======================== =========================
plan               forward of slot k           backward of slot k       safe
================== =========================== ======================== =========================
shared_temporaries tensors of the backward in  the same shared pool     yes, the smallest
                   a pool of slot k, the rest
                   in one pool shared by all
shared_backward    a pool of slot k            one pool shared by all   yes
pool_per_slot      a pool of slot k            the same pool            yes, the largest
one_pool           one pool shared by all      the same pool            no: to test the proof
================== =========================== ======================== =========================

The temporaries of the input half of a split backward, and all memory of the weight half, come from
the pool of a whole backward. Memory that the input half leaves for the weight half lies in the
slot's pool.

Under the first two plans the capture of a backward allocates only from scratch; in its slot's pool
it only frees memory. Under ``shared_temporaries`` a slot's input gradients are valid until the next
replay of any graph.

A rank with a single slot (no pipeline, or its last stage) has nothing to separate. There both plans
become ``pool_per_slot``, whose backward reuses memory that the forward frees, like an eager pass.
"""

from __future__ import annotations

from typing import Literal

from chunkgraph.graphs import GraphBackend, OperatorTrace, Pool, ScratchRouter

__all__ = ["MemoryPlan", "PoolPlan", "plan_for_slots"]

MemoryPlan = Literal["shared_temporaries", "shared_backward", "pool_per_slot", "one_pool"]


def plan_for_slots(plan: MemoryPlan, num_slots: int) -> MemoryPlan:
    """Return the smallest plan with the guarantees of ``plan``.

    Args:
        plan: The requested plan.
        num_slots: Number of slots of all chunks of the rank together.
    """
    if num_slots == 1 and plan in ("shared_temporaries", "shared_backward"):
        return "pool_per_slot"
    return plan


class PoolPlan:
    """Create the pools of one capture session.

    Args:
        plan: See the module's table.
        backend: Backend that creates the pools.
        label: Prefix of the pools' names.
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
        """Return the pool for a new slot's forward.

        Args:
            slot_label: Name of the slot in errors.
            num_bytes: Bytes to reserve for the forward in one block; 0 if unknown.
        """
        if self.plan == "one_pool":
            assert self.scratch is not None
            return self.scratch
        pool = self._backend.new_pool(f"{slot_label} pool")
        pool.reserve(num_bytes)
        self.slot_pools.append(pool)
        return pool

    def reserve_scratch(self, num_bytes: int) -> None:
        """Reserve the pool that all backwards share, if there is one, in one block."""
        if self.scratch is not None:
            self.scratch.reserve(num_bytes)

    def router(self, trace: OperatorTrace | None) -> ScratchRouter | None:
        """Return the router of a forward's temporaries to scratch; None under other plans.

        Args:
            trace: Trace of the forward; None if it was not watched.
        """
        if trace is None or self.plan != "shared_temporaries":
            return None
        return ScratchRouter(self._scratch(), trace)

    def input_router(self, trace: OperatorTrace | None) -> ScratchRouter | None:
        """Return the router of a split backward's input half; None under the last two plans.

        It sends temporaries to scratch. Other results, which the weight half reads, go to the
        slot's pool.

        Args:
            trace: Trace of the input half; None if it was not watched.
        """
        if trace is None or self.plan not in ("shared_temporaries", "shared_backward"):
            return None
        return ScratchRouter(self._scratch(), trace)

    def backward_pool(self, forward_pool: Pool) -> Pool:
        """Return the pool for the backward of the slot whose forward uses ``forward_pool``."""
        return forward_pool if self.plan == "pool_per_slot" else self._scratch()

    @property
    def pools(self) -> list[Pool]:
        """Return all pools of the session."""
        return [*self.slot_pools, *([self.scratch] if self.scratch else [])]

    def _scratch(self) -> Pool:
        assert self.scratch is not None
        return self.scratch
