"""Schedules of microbatches that each have a context-parallel size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from context_sizes import ForcedSizes, RandomSizes
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import PackingError
from chunkgraph.packing import (
    ContextLimits,
    ContextMicrobatch,
    PackedShape,
    SmallestSizes,
    pack,
    schedule_contexts,
)
from chunkgraph.packing.contexts import first_fit

LIMITS = ContextLimits(world_size=4, max_tokens_per_rank=16, max_packed_seqs=4)


@st.composite
def cases(draw):
    world = draw(st.sampled_from([1, 2, 4, 8]))
    every = [1 << k for k in range(world.bit_length())]
    sizes = tuple(draw(st.lists(st.sampled_from(every), unique=True)))
    limits = ContextLimits(
        world_size=world,
        max_tokens_per_rank=2 * draw(st.integers(1, 8)),
        max_packed_seqs=draw(st.integers(2, 5)),
        sizes=sizes,
        multiple_of=draw(st.integers(1, 3)),
    )
    longest = limits.max_tokens_per_rank * limits.group_sizes[0]
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=24))
    return lengths, limits


def microbatches(schedule):
    return [m for each in schedule.rounds for m in each]


@given(cases(), st.data())
def test_every_document_once_within_all_limits(case, data):
    lengths, limits = case
    sizes = st.lists(st.sampled_from(limits.group_sizes), min_size=1, max_size=4)
    forced = ForcedSizes((*data.draw(sizes), limits.group_sizes[0]), data.draw(st.integers(1, 3)))
    at_random = RandomSizes("1 2", data.draw(st.integers(1, 3)))
    for scheduler in (SmallestSizes(), forced, at_random):
        schedule = schedule_contexts(lengths, limits, scheduler)
        placed = sorted(d for m in microbatches(schedule) for d in m.documents)
        assert placed == list(range(len(lengths)))
        assert schedule.num_microbatches % limits.multiple_of == 0
        turns = [m for rank in range(limits.world_size) for m in schedule.of_rank(rank)]
        filled = sum(bool(turn.documents) for turn in turns)
        assert schedule.mean_filled_microbatches * limits.world_size == filled
        empty = [all(not m.documents for m in each) for each in schedule.rounds]
        assert schedule.num_filled_rounds + sum(empty) == schedule.num_microbatches
        for m in microbatches(schedule):
            assert m.first_rank % m.size == 0
            assert m.size in limits.group_sizes
            if not m.documents:
                continue
            # Packing raises if the documents and the dummy do not fit.
            packed = pack([lengths[d] for d in m.documents], limits.shape(m.size))
            assert len(packed.cu_seqlens) == limits.max_packed_seqs + 1
            assert packed.cu_seqlens_padded[-1] == limits.max_tokens_per_rank * m.size
        for rank in range(limits.world_size):
            own = schedule.of_rank(rank)
            assert len(own) == schedule.num_microbatches
            assert all(rank in m.ranks for m in own)
        assert schedule == schedule_contexts(tuple(lengths), replace(limits), scheduler)


@given(cases())
def test_no_document_takes_more_ranks_unless_some_would_idle(case):
    lengths, limits = case
    schedule = schedule_contexts(lengths, limits)
    ranks = sum(m.size for m in microbatches(schedule))
    rounds = limits.multiple_of
    assert ranks == schedule.num_microbatches * limits.world_size
    for m in microbatches(schedule):
        assert all(limits.smallest_size(lengths[d]) <= m.size for d in m.documents)
        if not m.documents:  # a filler: no other document can be split over these ranks
            for other in microbatches(schedule):
                assert len(other.documents) <= 1 or other.size > m.size
    needed = sum(limits.smallest_size(n) for n in lengths)
    assert schedule.num_microbatches <= max(
        -(-needed // (limits.world_size * rounds)) * rounds, rounds
    )


def test_longest_first_fills_what_order_would_not():
    microbatches = first_fit(enumerate([5, 5, 3, 3, 4, 4]), PackedShape(4, 8))
    assert [[place for place, _ in m] for m in microbatches] == [[0, 2], [1, 3], [4, 5]]


def test_long_documents_get_more_ranks_and_idle_ranks_get_work():
    schedule = schedule_contexts([60, 5, 9, 30, 2], LIMITS)
    assert schedule.rounds == (
        (ContextMicrobatch(4, 0, (0,)),),
        (
            ContextMicrobatch(2, 0, (3,)),
            ContextMicrobatch(1, 2, (2,)),
            ContextMicrobatch(1, 3, (1, 4)),
        ),
    )
    # A document that fits one rank: several of them are better than fillers.
    assert schedule_contexts([16], LIMITS).rounds == ((ContextMicrobatch(4, 0, (0,)),),)
    alone = schedule_contexts([16], replace(LIMITS, sizes=(1,)))
    assert [m.documents for m in microbatches(alone)] == [(0,), (), (), ()]


def test_what_cannot_be_is_refused():
    for wrong, message in (
        ({"world_size": 6}, "world_size: 6 is not a power of two"),
        ({"sizes": (3,)}, "sizes: 3 is not a power of two"),
        ({"sizes": (8,)}, "a group of 8 is larger than the world of 4 ranks"),
        ({"max_tokens_per_rank": 7}, "28, not a multiple of 8"),
        ({"max_packed_seqs": 1}, "one document and the dummy"),
    ):
        with pytest.raises(PackingError, match=message):
            replace(LIMITS, **wrong)
    with pytest.raises(PackingError, match=r"document 1 has 65 tokens, but the largest group \(of"):
        schedule_contexts([3, 65], LIMITS)
    with pytest.raises(PackingError, match="document 0 of 1 has a length of 0"):
        schedule_contexts([0], LIMITS)
