from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.packing import PackedShape, reason_not_to_fit
from chunkgraph.packing.context_scheduler import first_fit


@given(
    st.lists(st.integers(1, 24), max_size=40),
    st.integers(2, 6),
    st.sampled_from([1, 2, 3]),
)
def test_no_document_is_lost_and_every_microbatch_fits(lengths, num_seqs, size):
    shape = PackedShape(num_seqs, 24, size)
    microbatches = first_fit(enumerate(lengths), shape)
    assert sorted(itertools.chain(*microbatches)) == list(enumerate(lengths))
    for documents in microbatches:
        assert reason_not_to_fit([length for _, length in documents], shape) is None


def test_longest_first_fills_what_order_would_not():
    microbatches = first_fit(enumerate([5, 5, 3, 3, 4, 4]), PackedShape(4, 8))
    assert [[place for place, _ in m] for m in microbatches] == [[0, 2], [1, 3], [4, 5]]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=30))
def test_first_fit_leaves_no_two_that_fit_in_one(lengths):
    microbatches = first_fit(enumerate(lengths), PackedShape(100, 16))
    totals = [sum(length for _, length in documents) for documents in microbatches]
    assert all(a + b > 16 for a, b in itertools.combinations(totals, 2))
