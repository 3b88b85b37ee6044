"""The disjointness rule on plain address sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import MemoryPlanError
from chunkgraph.graphs import AddressRanges
from chunkgraph.memory import SlotFootprint, find_conflicts, prove_disjoint

ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=3).map(AddressRanges)


def members(addresses: AddressRanges) -> set[int]:
    return {p for r in addresses for p in range(r.start, r.end)}


@given(st.lists(st.tuples(ranges, ranges, ranges), min_size=1, max_size=4))
def test_conflicts_are_exactly_foreign_writes_into_live_memory(
    drawn: list[tuple[AddressRanges, AddressRanges, AddressRanges]],
) -> None:
    slots = [
        SlotFootprint(f"slot {i}", live, {f"F{i}": forward, f"B{i}": backward})
        for i, (live, forward, backward) in enumerate(drawn)
    ]
    expected = {
        (graph, reader.label)
        for reader in slots
        for writer in slots
        if writer is not reader
        for graph, writes in writer.writes.items()
        if members(writes) & members(reader.live)
    }
    assert {(graph, slot) for graph, slot, _ in find_conflicts(slots)} == expected
    if expected:
        with pytest.raises(MemoryPlanError, match="overwrites"):
            prove_disjoint(slots)
    else:
        prove_disjoint(slots)


def test_the_error_names_graph_slot_and_addresses() -> None:
    reader = SlotFootprint("chunk 0 slot 0", AddressRanges([(0x1000, 0x1200)]), {})
    writer = SlotFootprint(
        "chunk 0 slot 1", AddressRanges(), {"slot 1 forward": AddressRanges([(0x1100, 0x2000)])}
    )
    with pytest.raises(
        MemoryPlanError, match=r"slot 1 forward overwrites 256 bytes that chunk 0 slot 0.*0x1100"
    ):
        prove_disjoint([reader, writer])


def test_variants_of_one_slot_may_share_memory() -> None:
    """They are never in flight together; sharing with another slot, or without names, conflicts."""
    own = AddressRanges([(0x1000, 0x1100)])
    variants = [SlotFootprint(f"bank {b}", own, {"forward": own}, (0, 0)) for b in range(2)]
    prove_disjoint(variants)
    for other in ((0, 1), None):
        with pytest.raises(MemoryPlanError, match="4 conflicts"):
            prove_disjoint([*variants, SlotFootprint("other", own, {"forward": own}, other)])


def test_slots_that_are_never_in_flight_together_may_share_memory() -> None:
    """All but what Python kept: no graph of the reader writes it again."""
    own, kept = AddressRanges([(0x1000, 0x1100)]), AddressRanges([(0x2000, 0x2100)])
    slot = SlotFootprint("policy slot 0", own, {"forward": own})
    other = SlotFootprint("reference slot 0", own, {"reference forward": own | kept}, session=1)
    prove_disjoint([slot, other])
    with pytest.raises(MemoryPlanError, match="2 conflicts"):
        prove_disjoint([slot, replace(other, session=0)])
    reader = SlotFootprint("policy slot 1", AddressRanges(), {}, reads=kept)
    with pytest.raises(MemoryPlanError, match=r"reference forward overwrites .* policy slot 1"):
        prove_disjoint([reader, other])
