"""Sequences of one length, cut from documents end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.data import END_OF_DOCUMENT, NUM_TOKENS, Documents, PackedText, read_documents
from chunkgraph.errors import ConfigError


def shipped(seed: int = 1, seq_length: int = 64) -> PackedText:
    return PackedText(read_documents(None), seq_length=seq_length, seed=seed)


@pytest.mark.parametrize("other", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_a_batch_depends_on_its_coordinates_alone(other: tuple[int, int, int, int]) -> None:
    text, again = shipped(seed=0), shipped(seed=0)
    again.batch(5, 5, 2)
    base = text.batch(0, 0, 4, 0)
    assert np.array_equal(base, again.batch(0, 0, 4, 0))
    seed, step, microbatch, dp_rank = other
    assert not np.array_equal(base, shipped(seed=seed).batch(step, microbatch, 4, dp_rank))
    base[:] = 0  # batches do not share memory
    assert text.batch(0, 0, 4, 0).all()


documents = st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=12)


@given(documents, st.integers(1, 16), st.integers(0, 2**63))
def test_sequences_are_parts_of_the_documents_end_to_end(
    documents: list[bytes], seq_length: int, seed: int
) -> None:
    stream = [token for document in documents for token in [*document, END_OF_DOCUMENT]]
    if len(stream) <= seq_length:
        with pytest.raises(ConfigError, match="fewer than"):
            PackedText(documents, seq_length=seq_length, seed=seed)
        return
    text = PackedText(documents, seq_length=seq_length, seed=seed)
    assert text.num_sequences == (len(stream) - 1) // seq_length
    starts = range(0, text.num_sequences * seq_length, seq_length)
    sequences = [stream[start : start + seq_length + 1] for start in starts]
    batch = text.batch(0, 0, 20)
    assert batch.shape == (20, seq_length + 1)
    assert batch.dtype == np.int64
    assert batch.max() < NUM_TOKENS
    assert all(row in sequences for row in batch.tolist())


def test_documents_stand_between_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\n\none\ntwo\r\n\r\n  \nthree\n\n\n\n")
    assert read_documents(path) == [b"one\ntwo", b"three"]


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none\.txt: cannot read the text of data\.path: No such file"
    ):
        read_documents(tmp_path / "none.txt")
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"\n \n")
    with pytest.raises(ConfigError, match="is empty"):
        read_documents(empty)


# Whole documents in rows: the same for every run of a seed, never too long.

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
