"""Prove that slots can be replayed in any order.

Rule: let W(G) be the memory that graph G writes, and L(k) the memory that must survive from slot
k's forward to its backward. Every interleaving is correct if and only if W(G) and L(k) are disjoint
for every slot k and every graph G of another slot. (If they overlap, the order forward k, G,
backward k corrupts memory. If not, no graph in between writes memory that k still reads.)

A graph may also read memory of a pool that no graph of its slot writes: a tensor that Python kept
from another capture. Let R(k) be this memory. No graph of another slot, or of another variant, may
write it: one that does overwrites it, and only its replay gives it a value.

A slot may have several variants, of which one is in flight at a time. No graph of another variant
of slot k runs in between, so graphs of k's variants count as graphs of k. So do the slots of
another session, with a microbatch in flight only in steps of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from chunkgraph.errors import MemoryPlanError
from chunkgraph.graphs import AddressRanges


@dataclass(frozen=True)
class SlotFootprint:
    """The addresses of one slot of one chunk.

    Attributes:
        label: Name of the slot in errors.
        slot: Key that all variants of the slot share; None for a slot without variants.
        reads: Memory of pools that a graph of the slot reads and did not allocate, as far as the
            backend knows it.
        live: L(k), the memory that must survive from the slot's forward to its backward.
        writes: W(G) by label, for each graph of the slot and for loading its inputs.
        session: Key of its session; slots of two sessions are never in flight together.
    """

    label: str
    live: AddressRanges
    writes: dict[str, AddressRanges]
    slot: Hashable = None
    reads: AddressRanges = field(default_factory=AddressRanges)
    session: int = 0

    def foreign(self) -> AddressRanges:
        """Return R(k), the memory of ``reads`` that no graph of the slot writes."""
        foreign = self.reads
        for writes in self.writes.values():
            foreign = foreign - writes
        return foreign


def find_conflicts(slots: Sequence[SlotFootprint]) -> list[tuple[str, str, AddressRanges]]:
    """List (graph, slot, addresses) for each graph that writes memory another slot still reads."""
    conflicts: list[tuple[str, str, AddressRanges]] = []
    for reader in slots:
        foreign = reader.foreign()
        for writer in slots:
            if writer is reader:
                continue
            is_variant = reader.slot is not None and writer.slot == reader.slot
            may_share = is_variant or writer.session != reader.session
            read = foreign if may_share else reader.live | foreign
            for graph, writes in writer.writes.items():
                common = writes & read
                if common:
                    conflicts.append((graph, reader.label, common))
    return conflicts


def prove_disjoint(slots: Sequence[SlotFootprint]) -> None:
    """Check the rule for all slots of a rank.

    Raises:
        MemoryPlanError: Graphs and slots conflict; the message names the first few pairs.
    """
    conflicts = find_conflicts(slots)
    if not conflicts:
        return
    shown = "\n".join(
        f"  replaying {graph} overwrites {common.num_bytes} bytes that {slot} still reads "
        f"({next(iter(common))}{', ...' if len(common) > 1 else ''})"
        for graph, slot, common in conflicts[:5]
    )
    more = f"\n  and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
    raise MemoryPlanError(
        f"The captured graphs share memory that is in use: {len(conflicts)} conflicts.\n"
        f"{shown}{more}\n"
        "  Replays would compute wrong results, so the graphs were freed. This is a bug of "
        "chunkgraph: please report this message, and train without graphs."
    )
