"""Whole documents in rows: the same for every run of a seed, never too long."""

from __future__ import annotations

import numpy as np

from chunkgraph.data import END_OF_DOCUMENT, Documents

_TEXT = [b"one", b"a document of thirty bytes, yes", b"x", b"four"]


def test_rows_are_whole_documents() -> None:
    documents = Documents(_TEXT, num_tokens=12, seed=1)
    seen: set[bytes] = set()
    for step in range(40):
        row = documents.row(step, 0)
        assert row.lengths == documents.row(step, 0).lengths
        assert 0 < sum(row.lengths) == len(row.tokens) == len(row.labels) <= 12
        ends = np.cumsum(row.lengths)
        for end, length in zip(ends, row.lengths, strict=True):
            tokens, labels = row.tokens[end - length : end], row.labels[end - length : end]
            assert np.array_equal(labels[:-1], tokens[1:])
            assert labels[-1] == END_OF_DOCUMENT
            seen.add(tokens.astype(np.uint8).tobytes())
    # The long one is cut into parts.
    assert seen == {b"one", b"x", b"four", b"a document o", b"f thirty byt", b"es, yes"}


def test_a_row_is_a_function_of_its_place() -> None:
    documents, again = (Documents(_TEXT, num_tokens=12, seed=3) for _ in range(2))
    places = [(s, m, r) for s in range(3) for m in range(3) for r in range(2)]
    assert [documents.row(*p).lengths for p in places] == [
        again.row(*p).lengths for p in places[::-1]
    ][::-1]
    assert len({documents.row(*p).lengths for p in places}) > 4


def test_padding_after_a_document_takes_room() -> None:
    documents = Documents([b"abcde", b"x"], num_tokens=16, seed=2, multiple=4)
    rows = [[-(-n // 4) * 4 for n in documents.row(step, 0).lengths] for step in range(40)]
    assert all(8 < sum(row) <= 16 for row in rows)
    assert {sum(row) for row in rows} == {12, 16}
