from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import PackingError
from chunkgraph.packing import PackedShape, reason_not_to_fit, schedule_microbatches


@given(
    st.lists(st.integers(1, 24), max_size=40),
    st.integers(2, 6),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 50),
)
def test_no_document_is_lost_and_every_microbatch_fits(lengths, num_seqs, size, window):
    shape = PackedShape(num_seqs, 24, size)
    microbatches = list(schedule_microbatches(lengths, shape, window=window))
    placed = sorted(itertools.chain(*microbatches))
    assert placed == list(range(len(lengths)))
    for documents in microbatches:
        assert list(documents) == sorted(documents)
        assert reason_not_to_fit([lengths[place] for place in documents], shape) is None
    assert microbatches == list(schedule_microbatches(iter(lengths), shape, window=window))


def test_longest_first_fills_what_order_would_not():
    lengths = [5, 5, 3, 3, 4, 4]
    assert list(schedule_microbatches(lengths, PackedShape(4, 8))) == [(0, 2), (1, 3), (4, 5)]
    # Only what was read can be put together.
    narrow = list(schedule_microbatches(lengths, PackedShape(4, 8), window=1))
    assert len(narrow) > 3


@given(st.lists(st.integers(1, 16), min_size=1, max_size=30))
def test_first_fit_leaves_no_two_that_fit_in_one(lengths):
    shape = PackedShape(100, 16)
    microbatches = list(schedule_microbatches(lengths, shape))
    totals = [sum(lengths[place] for place in documents) for documents in microbatches]
    assert all(a + b > 16 for a, b in itertools.combinations(totals, 2))


def test_a_stream_is_read_a_window_at_a_time():
    endless = itertools.cycle([3, 5])
    found = schedule_microbatches(endless, PackedShape(4, 8), window=4)
    # One of the first window's two microbatches waits for the second window.
    assert next(found) == (0, 1)
    assert sorted(next(found) + next(found)) == [2, 3, 4, 5]


def test_bad_documents_are_named_by_their_place_in_the_stream():
    shape = PackedShape(4, 8)
    with pytest.raises(PackingError, match="document 5 has 9 tokens, more than the 8"):
        list(schedule_microbatches([1, 2, 3, 4, 5, 9], shape, window=2))
    with pytest.raises(PackingError, match="documents 2 to 3: document 1 of 2 has a length of 0"):
        list(schedule_microbatches([1, 2, 3, 0], shape, window=2))
    with pytest.raises(PackingError, match="at least 1 document"):
        list(schedule_microbatches([1], shape, window=0))
    for window in (1.5, "all", True):
        with pytest.raises(PackingError, match=f"The window is {window!r}; it is a whole number"):
            list(schedule_microbatches([1], shape, window=window))
    assert list(schedule_microbatches([1, 2], shape, window=np.int64(2))) == [(0, 1)]
