"""Microbatches whose numbers of documents follow a distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.data import END_OF_DOCUMENT, DrawnDocuments, check_counts
from chunkgraph.data.counts import COUNT_SHARES, count_at
from chunkgraph.errors import ConfigError

_SHIPPED = (12, 43, 106, 358)
quantiles = st.lists(st.integers(1, 400), min_size=4, max_size=4).map(sorted)


@given(quantiles, st.floats(0, 1), st.floats(0, 1))
def test_the_quantile_function_rises_through_the_known_ones(
    counts: list[int], one: float, other: float
) -> None:
    assert [count_at(counts, share) for share in COUNT_SHARES] == counts
    low, high = sorted((one, other))
    assert 1 <= count_at(counts, low) <= count_at(counts, high) <= counts[-1]


def test_drawn_microbatches_have_the_shipped_quantiles() -> None:
    documents = DrawnDocuments.from_file(None, counts=_SHIPPED, num_tokens=4096, seed=3)
    drawn = [documents.lengths(step, 0) for step in range(3000)]
    numbers = np.array([len(lengths) for lengths in drawn])
    counts = np.quantile(numbers, COUNT_SHARES, method="inverted_cdf")
    assert counts[:3] == pytest.approx(_SHIPPED[:3], rel=0.1)
    assert 200 < counts[3] <= 358
    assert all(min(lengths) > 0 and sum(lengths) <= 4096 for lengths in drawn)


def test_rows_hold_stretches_of_the_text_and_end_each_document() -> None:
    text = bytes(range(200)) + b"a text that is not very long"
    documents = DrawnDocuments([text], counts=(3, 5, 8, 12), num_tokens=40, seed=1)
    endless = text * 2
    for step in range(30):
        row = documents.row(step, 1, 2)
        assert row.lengths == documents.lengths(step, 1, 2)
        assert sum(row.lengths) == len(row.tokens) == len(row.labels)
        for end, length in zip(np.cumsum(row.lengths), row.lengths, strict=True):
            tokens, labels = row.tokens[end - length : end], row.labels[end - length : end]
            assert tokens.astype(np.uint8).tobytes() in endless
            assert np.array_equal(labels[:-1], tokens[1:])
            assert labels[-1] == END_OF_DOCUMENT


def test_other_places_and_seeds_draw_otherwise() -> None:
    datasets = [
        DrawnDocuments([b"text"], counts=(3, 5, 8, 12), num_tokens=40, seed=seed)
        for seed in (1, 1, 2)
    ]
    places = [(s, m, r) for s in range(3) for m in range(3) for r in range(2)]
    first, again, other = ([d.lengths(*place) for place in places] for d in datasets)
    assert first == again
    assert first != other
    assert len(set(first)) > 12


def test_documents_fit_with_the_padding_of_each() -> None:
    documents = DrawnDocuments([b"text"], counts=(3, 5, 8, 10), num_tokens=40, seed=1, multiple=4)
    drawn = [documents.lengths(step, 0) for step in range(60)]
    assert all(sum(-(-n // 4) * 4 for n in lengths) <= 40 for lengths in drawn)
    assert {n % 4 for lengths in drawn for n in lengths} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="11 documents of at least 4 rows each do not fit in 40"):
        DrawnDocuments([b"text"], counts=(3, 5, 8, 11), num_tokens=40, seed=1, multiple=4)


@pytest.mark.parametrize("counts", [(), (1, 2, 3), (3, 2, 4, 5), (0, 1, 2, 3)])
def test_what_is_no_distribution_is_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expected four numbers"):
        check_counts(counts)


def test_more_documents_than_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="12 documents do not fit in 8 tokens"):
        DrawnDocuments([b"text"], counts=(3, 5, 8, 12), num_tokens=8, seed=1)
