from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chunkgraph.errors import PackingError
from chunkgraph.packing import (
    OverflowReason,
    PackedShape,
    pack,
    reason_not_to_fit,
    smallest_that_fits,
)
from chunkgraph.packing.seq_counts import default_seq_buckets
from chunkgraph.settings import config_from_mapping, resolved

lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 8), r"max_packed_seqs is 1; .* at least 2 \(one document and the dummy\)"),
        ((4, 0), "max_packed_tokens is 0"),
        ((True, 8), "max_packed_seqs is True"),
        ((4, 8, 0), "context_parallel_size is 0"),
        ((4, 10, 2), "10, not a multiple of 4, .* The next possible value is 12"),
        ((4, 2**31), "offsets are int32 and end at 2147483647"),
        ((4, 8, 1, True, 0), "pad_seq_to_mult is 0"),
        ((4, 8, 1, False, 8), "pad_seq_to_mult is 8 without counts_padding"),
        ((4, 20, 1, True, 8), "20, not a multiple of 8, .* The next possible value is 24"),
    ],
)
def test_impossible_sizes(sizes, message):
    with pytest.raises(PackingError, match=message):
        PackedShape(*sizes)


@given(lengths_of_documents, st.integers(2, 9), st.integers(1, 12), st.sampled_from([1, 2, 3]))
def test_a_reason_is_given_exactly_when_a_limit_is_broken(lengths, num_seqs, units, size):
    multiple = 1 if size == 1 else 2 * size
    shape = PackedShape(num_seqs, 12 * units, size)
    rows = sum(-(-length // multiple) * multiple for length in lengths)
    broken = set()
    if max(lengths) > shape.max_packed_tokens:
        broken.add(OverflowReason.DOCUMENT_TOO_LONG)
    if len(lengths) > num_seqs - 1:
        broken.add(OverflowReason.TOO_MANY_DOCUMENTS)
    if rows > shape.max_packed_tokens:
        broken.add(OverflowReason.TOO_MANY_TOKENS)
    reason = reason_not_to_fit(lengths, shape)
    assert (reason in broken) if broken else (reason is None)


@given(lengths_of_documents, st.integers(1, 20), st.sampled_from([1, 2]))
def test_the_smallest_bucket_is_chosen(lengths, units, size):
    shape = PackedShape(6, 16 * units, size)
    buckets = shape.buckets()
    assert [bucket.max_packed_tokens for bucket in buckets] == [16 * units, 8 * units, 4 * units]
    assert {bucket.max_packed_seqs for bucket in buckets} == {6}
    chosen = smallest_that_fits(lengths, buckets)
    fitting = [bucket for bucket in buckets if reason_not_to_fit(lengths, bucket) is None]
    assert chosen == (fitting[-1] if fitting else None)
    # All larger buckets fit too, so ranks can agree on the largest of their choices.
    assert fitting == list(buckets[: len(fitting)])


def test_buckets_are_rounded_up_and_reported_once():
    assert [b.max_packed_tokens for b in PackedShape(4, 40, 2).buckets()] == [40, 20, 12]
    assert [b.max_packed_tokens for b in PackedShape(4, 4, 2).buckets()] == [4]
    by_eight = PackedShape(4, 48).buckets((0.3,), multiple_of=8)
    assert [b.max_packed_tokens for b in by_eight] == [48, 16]
    for wrong in (0, 1.5, 9, "a"):
        with pytest.raises(PackingError, match=f"A bucket of {wrong}: a bucket is a fraction"):
            PackedShape(4, 8).buckets((wrong,))
    with pytest.raises(PackingError, match="not a multiple of 16"):
        PackedShape(4, 40).buckets(multiple_of=16)


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([1, 2]), st.integers(1, 16))
@example(1072, 680, 1, 1)
def test_buckets_in_tokens_are_of_so_many(units, part, size, multiple):
    """Inexact divisions add no tokens; bounds are rounded up where necessary."""
    whole = math.lcm(1 if size == 1 else 2 * size, multiple)
    tokens = min(part, units) * whole
    shape = PackedShape(4, units * whole, size)
    for num_tokens in {tokens, tokens - whole + 1} - {1}:
        (*_, bucket) = shape.buckets([num_tokens], multiple_of=multiple)
        assert bucket.max_packed_tokens == tokens


@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), st.sampled_from([1, 2, 4]))
def test_offsets_include_padding_that_is_counted(lengths, size):
    shape = PackedShape(5, 400, context_parallel_size=size, counts_padding=True)
    assert all(bucket.counts_padding for bucket in shape.buckets())
    counted, alone = pack(lengths, shape), pack(lengths, replace(shape, counts_padding=False))
    ends = counted.cu_seqlens_padded[len(lengths)]
    assert (counted.cu_seqlens == np.minimum(counted.cu_seqlens_padded, ends)).all()
    if not any(length % shape.document_multiple for length in lengths):
        assert (counted.cu_seqlens == alone.cu_seqlens).all()
    # Only attention's offsets count the padding.
    for name in ("cu_seqlens_padded", "position_ids", "padding_mask", "seq_idx"):
        assert (getattr(counted, name) == getattr(alone, name)).all()
    assert counted.num_valid_tokens == alone.num_valid_tokens == sum(lengths)


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 8, 10, 32]),
)
def test_documents_begin_at_multiples(lengths, size, multiple):
    """Of the multiple that they are padded to; context-parallel ranks have two pieces of each."""
    whole = math.lcm(1 if size == 1 else 2 * size, multiple)
    shape = PackedShape(5, 8 * whole * 90, size, True, multiple)
    assert shape.document_multiple == whole
    rows = sum(-(-length // whole) * whole for length in lengths)
    tight = whole * -(-sum(lengths) // whole)
    small = replace(shape, max_packed_tokens=tight)
    assert (reason_not_to_fit(lengths, small) is None) == (rows <= tight)
    packed = pack(lengths, shape)
    offsets = packed.cu_seqlens_padded
    assert not (offsets % whole).any()
    ends = offsets[1 : len(lengths) + 1]
    assert (packed.cu_seqlens == np.minimum(offsets, ends[-1])).all()
    assert ends[-1] == rows
    assert np.diff(offsets).max() <= packed.max_seqlen
    assert all(b.pad_seq_to_mult == multiple for b in shape.buckets())
    assert not any(b.max_packed_tokens % whole for b in shape.buckets((0.013, 0.3)))


def test_powers_of_two_up_to_half_and_32_for_short_rows() -> None:
    for most, expected in ((0, ()), (127, ()), (128, (64,)), (512, (64, 128, 256))):
        assert default_seq_buckets(most, 1025) == expected
    for most, expected in ((0, ()), (32, ()), (33, (32,)), (127, (32,)), (128, (32, 64))):
        assert default_seq_buckets(most, 1024) == expected


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        ({}, (64,)),
        ({"seq_buckets": []}, ()),
        ({"seq_buckets": [9, 100]}, (9, 100)),
        ({"context_parallel_sizes": [1]}, (64,)),
        ({"max_packed_tokens": 1024}, (32, 64)),
        ({"buckets": [0.5]}, (32, 64)),
        ({"buckets": [0.75, 1.0]}, (64,)),
    ],
)
def test_what_a_run_has(packing: dict, expected: tuple[int, ...]) -> None:
    config = config_from_mapping(
        {
            "device": "cuda",
            "model": {
                "num_layers": 2,
                "hidden_size": 64,
                "ffn_hidden_size": 128,
                "num_attention_heads": 4,
                "layer_spec": "transformer_engine",
                "seq_length": 2048,
            },
            "train": {"micro_batch_size": 1, "num_microbatches": [2]},
            "packing": {"max_packed_seqs": 200, **packing},
        }
    )
    assert resolved(config).packing.seq_buckets == expected
