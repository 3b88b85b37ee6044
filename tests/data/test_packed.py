"""Sequences of one length, cut from documents end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.data import END_OF_DOCUMENT, NUM_TOKENS, PackedText, read_documents
from chunkgraph.errors import ConfigError


def shipped(seed: int = 1, seq_length: int = 64) -> PackedText:
    return PackedText(read_documents(None), seq_length=seq_length, seed=seed)


def test_shipped_text_is_some_hundred_kilobytes_of_english() -> None:
    documents = read_documents()
    assert 300_000 < sum(map(len, documents)) < 600_000
    assert documents[0] == b"Chapter 1"
    assert documents[1].startswith(b"Sir Walter Elliot, of Kellynch Hall,")
    assert all(byte < 128 for document in documents for byte in document)


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
