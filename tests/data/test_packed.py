from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.data import END_OF_DOCUMENT, NUM_TOKENS, PackedBatch, PackedText, read_documents
from chunkgraph.errors import ConfigError

FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "document_ids")


def same(left: PackedBatch, right: PackedBatch) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in FIELDS)


def shipped(seed: int = 1, seq_length: int = 64) -> PackedText:
    return PackedText.from_file(None, seq_length=seq_length, seed=seed)


def test_shipped_text_is_some_hundred_kilobytes_of_english() -> None:
    documents = read_documents()
    assert 300_000 < sum(map(len, documents)) < 600_000
    assert documents[0] == b"Chapter 1"
    assert documents[1].startswith(b"Sir Walter Elliot, of Kellynch Hall,")
    assert all(byte < 128 for document in documents for byte in document)


def test_shapes_and_types() -> None:
    batch = shipped().batch(0, 0, 3)
    for name in FIELDS:
        assert getattr(batch, name).shape == (3, 64)
    assert batch.tokens.dtype == batch.labels.dtype == batch.position_ids.dtype == np.int64
    assert batch.loss_mask.dtype == np.float32
    assert batch.attention_mask().shape == (3, 1, 64, 64)
    assert batch.attention_mask().dtype == np.bool_
    assert 0 <= batch.tokens.min() <= batch.tokens.max() < NUM_TOKENS


def test_a_batch_depends_on_nothing_but_its_coordinates() -> None:
    first, second = shipped(), shipped()
    second.batch(5, 5, 2)
    assert same(first.batch(1, 2, 2, 0), second.batch(1, 2, 2, 0))


@pytest.mark.parametrize("other", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_seed_step_microbatch_and_rank_each_matter(other: tuple[int, int, int, int]) -> None:
    base = shipped(seed=0).batch(0, 0, 4, 0)
    seed, step, microbatch, dp_rank = other
    assert not same(base, shipped(seed=seed).batch(step, microbatch, 4, dp_rank))


def test_batches_do_not_share_memory() -> None:
    text = shipped()
    batch = text.batch(0, 0, 2)
    batch.tokens[:] = 0
    assert text.batch(0, 0, 2).tokens.any()


documents = st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=12)


@given(documents, st.integers(1, 16), st.integers(0, 2**63))
def test_packing_loses_nothing_and_follows_documents(
    documents: list[bytes], seq_length: int, seed: int
) -> None:
    stream = [token for document in documents for token in [*document, END_OF_DOCUMENT]]
    if len(stream) <= seq_length:
        with pytest.raises(ConfigError, match="fewer than"):
            PackedText(documents, seq_length=seq_length, seed=seed)
        return
    text = PackedText(documents, seq_length=seq_length, seed=seed)
    assert text.num_tokens == len(stream)
    for index in range(text.num_sequences):
        start = index * seq_length
        assert text.sequence(index).tolist() == stream[start : start + seq_length + 1]
    batch = text.batch(0, 0, 2)
    for row in range(2):
        tokens, labels = batch.tokens[row].tolist(), batch.labels[row].tolist()
        assert tokens[1:] == labels[:-1]
        document, position = 0, 0
        for i, token in enumerate(tokens):
            assert batch.document_ids[row, i] == document
            assert batch.position_ids[row, i] == position
            assert batch.loss_mask[row, i] == (token != END_OF_DOCUMENT)
            is_end = token == END_OF_DOCUMENT
            document, position = document + is_end, 0 if is_end else position + 1


@given(documents.filter(lambda docs: sum(map(len, docs)) >= 9))
def test_attention_sees_the_past_of_the_same_document_only(documents: list[bytes]) -> None:
    batch = PackedText(documents, seq_length=9, seed=0).batch(0, 0, 2)
    mask = batch.attention_mask()
    for row in range(2):
        ids = batch.document_ids[row]
        for query in range(9):
            for key in range(9):
                may_see = key <= query and ids[key] == ids[query]
                assert mask[row, 0, query, key] == (not may_see)


def test_documents_stand_between_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\n\none\ntwo\r\n\r\n  \nthree\n\n\n\n")
    assert read_documents(path) == [b"one\ntwo", b"three"]


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path: cannot read .*none\.txt.*No such file"):
        read_documents(tmp_path / "none.txt")
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"\n \n")
    with pytest.raises(ConfigError, match="is empty"):
        read_documents(empty)


def test_a_sequence_outside_the_text_is_an_error() -> None:
    text = shipped()
    with pytest.raises(IndexError):
        text.sequence(text.num_sequences)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_context_parallel_ranks_share_every_sequence(num_ranks: int) -> None:
    whole = shipped().batch(0, 0, 3)
    parts = [whole.part(rank, num_ranks) for rank in range(num_ranks)]
    assert all(part.tokens.shape == (3, 64 // num_ranks) for part in parts)
    assert sum(part.num_labels for part in parts) == whole.num_labels
    # Each rank has a piece from the front and one from the end; put them back in order.
    halves = [np.split(part.tokens, 2, axis=1) for part in parts]
    joined = [front for front, _ in halves] + [back for _, back in reversed(halves)]
    assert np.array_equal(np.concatenate(joined, axis=1), whole.tokens)
    assert all(part.tokens.flags.c_contiguous for part in parts)
