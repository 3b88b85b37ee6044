from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import PackingError
from chunkgraph.packing import OverflowReason, PackedShape, check_offsets, pack, reason_not_to_fit


@st.composite
def fitting(draw: st.DrawFn) -> tuple[list[int], PackedShape]:
    """Draw documents and a shape that holds them, full or with room."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=12))
    size = draw(st.sampled_from([1, 1, 2, 3, 4]))
    multiple = 1 if size == 1 else 2 * size
    rows = sum(-(-length // multiple) for length in lengths)
    num_rows = multiple * (rows + draw(st.integers(0, 5)))
    shape = PackedShape(
        max_packed_seqs=len(lengths) + 1 + draw(st.integers(0, 4)),
        max_packed_tokens=num_rows,
        context_parallel_size=size,
    )
    return lengths, shape


@given(fitting())
def test_rows_are_what_a_loop_over_documents_gives(drawn):
    lengths, shape = drawn
    packed = pack(lengths, shape)
    cu_seqlens, cu_padded, rows = [0], [0], []
    for document, length in enumerate(lengths):
        padded = shape.padded_length(length)
        cu_seqlens.append(cu_seqlens[-1] + length)
        cu_padded.append(cu_padded[-1] + padded)
        rows += [(document, position, False) for position in range(length)]
        rows += [(len(lengths), 0, True)] * (padded - length)
    rows += [(len(lengths), 0, True)] * (shape.max_packed_tokens - len(rows))
    empty = shape.max_packed_seqs - len(lengths)
    assert packed.cu_seqlens.tolist() == cu_seqlens + [cu_seqlens[-1]] * empty
    assert packed.cu_seqlens_padded.tolist() == cu_padded + [shape.max_packed_tokens] * empty
    packed_rows = zip(packed.seq_idx, packed.position_ids, packed.padding_mask, strict=True)
    assert [(int(i), int(p), bool(m)) for i, p, m in packed_rows] == rows
    assert packed.num_documents == len(lengths)
    assert packed.num_valid_tokens == sum(lengths)
    assert packed.max_seqlen == shape.max_packed_tokens
    assert packed.cu_seqlens.dtype == packed.cu_seqlens_padded.dtype == np.int32
    for offsets in (packed.cu_seqlens, packed.cu_seqlens_padded):
        check_offsets(offsets, shape.max_packed_tokens)


@given(fitting())
def test_ranks_share_the_rows_and_each_has_two_pieces_of_every_document(drawn):
    lengths, shape = drawn
    packed = pack(lengths, shape)
    size = shape.context_parallel_size
    by_rank = [packed.rows_of_rank(rank) for rank in range(size)]
    assert all(len(rows) == shape.tokens_per_rank for rows in by_rank)
    assert sorted(np.concatenate(by_rank).tolist()) == list(range(shape.max_packed_tokens))
    if size == 1:
        return
    edges = packed.cu_seqlens_padded.tolist()
    for rank, rows in enumerate(by_rank):
        expected = []
        for begin, end in itertools.pairwise(edges):
            piece = (end - begin) // (2 * size)
            for part in (rank, 2 * size - 1 - rank):
                expected += range(begin + part * piece, begin + (part + 1) * piece)
        assert rows.tolist() == expected


@given(fitting())
def test_values_go_to_their_documents_rows(drawn):
    lengths, shape = drawn
    packed = pack(lengths, shape)
    values = np.concatenate([100 * i + np.arange(n) for i, n in enumerate(lengths)])
    rows = packed.place(values)
    assert rows.dtype == values.dtype
    expected = np.where(packed.padding_mask, 0, 100 * packed.seq_idx + packed.position_ids)
    assert rows.tolist() == expected.tolist()
    assert packed.place(np.ones((sum(lengths), 3), dtype=np.float32)).shape == (len(rows), 3)
    with pytest.raises(PackingError, match="values for documents of"):
        packed.place(values[1:])


def test_a_worked_example():
    packed = pack([3, 2], PackedShape(4, 8))
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 5, 5]
    assert packed.cu_seqlens_padded.tolist() == [0, 3, 5, 8, 8]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert packed.seq_idx.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    with pytest.raises(PackingError, match="rank 1 is outside"):
        packed.rows_of_rank(1)


@pytest.mark.parametrize(
    ("lengths", "reason", "detail"),
    [
        ([9], OverflowReason.DOCUMENT_TOO_LONG, "document 0 has 9 tokens of 8"),
        ([1] * 4, OverflowReason.TOO_MANY_DOCUMENTS, "4 documents; 4 sequences are 3"),
        ([4, 3, 2], OverflowReason.TOO_MANY_TOKENS, "9 tokens with padding, of 8"),
    ],
)
def test_what_does_not_fit_is_reported_and_refused(lengths, reason, detail):
    shape = PackedShape(4, 8)
    assert reason_not_to_fit(lengths, shape) is reason
    with pytest.raises(PackingError) as error:
        pack(lengths, shape)
    assert str(error.value).startswith("the documents do not fit")
    assert reason.value in str(error.value)
    assert detail in str(error.value)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "without documents"),
        ([3, 0, 2], "document 1 of 3 has a length of 0"),
        ([-1], "document 0 of 1 has a length of -1"),
        ([1.5], "a list of integers, not float64"),
        ([[1, 2]], r"of shape \[1, 2\]"),
        (["a"], "a list of integers"),
    ],
)
def test_bad_lengths_are_refused(lengths, message):
    with pytest.raises(PackingError, match=message):
        pack(lengths, PackedShape(4, 8))
    with pytest.raises(PackingError, match=message):
        reason_not_to_fit(lengths, PackedShape(4, 8))


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (int32(0, 5, 4, 9), r"decreases from 5 to 4 \(entry 2\)"),
        (int32(1, 5), "starts at 1, not at 0"),
        (int32(0, 5, 10), "ends at 10, beyond the 9 tokens"),
        (np.array([]), "has 0 entries"),
        (np.array([0, 9]), "is int64, not int32"),
        (int32(0, 9)[None], r"has the shape \[1, 2\]"),
    ],
)
def test_bad_offsets_are_refused_with_their_place(offsets, message):
    with pytest.raises(PackingError, match=message) as error:
        check_offsets(offsets, 9, where="rank 2, microbatch 5")
    assert str(error.value).startswith("rank 2, microbatch 5: ")
