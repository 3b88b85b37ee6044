"""The proof that slots can be replayed in any order.

Rule: with W(G) all that graph G writes and L(k) all that is read between slot k's forward and its
backward, any interleaving is right if and only if W(G) and L(k) are disjoint for every slot k and
every graph G that is not k's own. (If they meet, the order forward k, G, backward k corrupts; if
not, nothing that runs in between touches what k still reads.)

A slot may have several variants, one of which is in flight at a time. No graph of another variant
of the same slot runs in between then, so that these are k's own too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from chunkgraph.errors import MemoryPlanError
from chunkgraph.graphs import AddressRanges

__all__ = ["SlotFootprint", "find_conflicts", "prove_disjoint"]


@dataclass(frozen=True)
class SlotFootprint:
    """The addresses of one slot of one chunk.

    Attributes:
        label: names the slot in errors.
        slot: the same for all variants of one slot; None: it has no other.
        live: L(k), read between the slot's forward and its backward.
        writes: W(G) by label, for each of the slot's own graphs, and for loading its inputs.
    """

    label: str
    live: AddressRanges
    writes: dict[str, AddressRanges]
    slot: Hashable = None


def find_conflicts(slots: Sequence[SlotFootprint]) -> list[tuple[str, str, AddressRanges]]:
    """Every (graph, slot, addresses) where a foreign graph writes what the slot still reads."""
    conflicts: list[tuple[str, str, AddressRanges]] = []
    for reader in slots:
        for writer in slots:
            if writer is reader or (reader.slot is not None and writer.slot == reader.slot):
                continue
            for graph, writes in writer.writes.items():
                common = writes & reader.live
                if common:
                    conflicts.append((graph, reader.label, common))
    return conflicts


def prove_disjoint(slots: Sequence[SlotFootprint]) -> None:
    """Check the rule for all slots of a rank.

    Raises:
        MemoryPlanError: naming each pair of graph and slot that collide (the first few).
    """
    conflicts = find_conflicts(slots)
    if not conflicts:
        return
    shown = "\n".join(
        f"  replaying {graph} overwrites {common.num_bytes} bytes that {slot} still reads "
        f"({next(iter(common))}{', ...' if len(common.ranges) > 1 else ''})"
        for graph, slot, common in conflicts[:5]
    )
    more = f"\n  and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
    raise MemoryPlanError(
        f"The captured graphs share memory that is in use: {len(conflicts)} conflicts.\n"
        f"{shown}{more}\n"
        "  Replays would give wrong numbers, so the graphs were dropped. "
        "Use memory_plan 'shared_backward' or 'pool_per_slot'."
    )
