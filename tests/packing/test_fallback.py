from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkgraph.packing import (
    PackedShape,
    allowed_misfits,
    evaluate,
    fallback_share,
    fits,
    pack,
    pack_in_order,
    padding_waste,
    reason_not_to_fit,
    recommend,
    sizes_of,
    smallest_that_fits,
)

documents = st.lists(st.integers(1, 20), min_size=1, max_size=40)


@given(documents, st.integers(1, 6), st.sampled_from([1, 2, 3]))
def test_packing_in_order_is_what_a_loop_gives(lengths, units, size):
    shape = PackedShape(2, 12 * units, size)
    expected: list[list[int]] = []
    for length in lengths:
        rows = sum(map(shape.padded_length, expected[-1])) if expected else 0
        if not expected or rows + shape.padded_length(length) > shape.max_packed_tokens:
            expected.append([])
        expected[-1].append(length)
    tokens = np.array(lengths)
    ends = pack_in_order(tokens, shape)
    sizes = sizes_of(tokens, ends, shape)
    assert sizes.num_documents.tolist() == [len(group) for group in expected]
    assert sizes.num_tokens.tolist() == [sum(group) for group in expected]
    assert sizes.longest.tolist() == [max(group) for group in expected]
    assert sizes.num_rows.tolist() == [sum(map(shape.padded_length, g)) for g in expected]
    probe = PackedShape(4, 12, size)
    assert fits(sizes, probe).tolist() == [reason_not_to_fit(g, probe) is None for g in expected]


def test_blocks_join_without_a_seam():
    tokens = np.random.default_rng(0).integers(1, 9, size=150_000)
    ends = pack_in_order(tokens, PackedShape(2, 8))
    sizes = sizes_of(tokens, ends, PackedShape(2, 8))
    assert sizes.num_tokens.sum() == tokens.sum()
    assert sizes.num_tokens.max() <= 8
    # Each microbatch ended because the next document had no room.
    assert (sizes.num_tokens[:-1] + tokens[ends[:-1]] > 8).all()


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 10))
def test_fallback_share_is_that_of_all_possible_steps(is_misfit, per_step):
    steps = list(itertools.combinations(is_misfit, min(per_step, len(is_misfit))))
    expected = sum(any(step) for step in steps) / len(steps)
    share = fallback_share(sum(is_misfit), len(is_misfit), per_step)
    assert share == pytest.approx(expected, abs=1e-12)
    assert 0 <= share <= 1


@given(st.integers(1, 200), st.integers(1, 50), st.floats(0, 0.99))
def test_the_budget_is_the_most_that_meets_the_target(num_microbatches, per_step, target):
    budget = allowed_misfits(target, num_microbatches, per_step)
    assert fallback_share(budget, num_microbatches, per_step) <= target
    assert fallback_share(budget + 1, num_microbatches, per_step) > target


@given(documents, st.integers(2, 6), st.integers(1, 12), st.sampled_from([1, 2]))
def test_waste_is_the_padding_of_the_packed_arrays(lengths, num_seqs, units, size):
    data = PackedShape(2, 24, size)
    tokens = np.array(lengths)
    ends = pack_in_order(tokens, data)
    sizes = sizes_of(tokens, ends, data)
    shape = PackedShape(num_seqs, 4 * units, size)
    for shapes in ([shape], list(shape.buckets())):
        masks = []
        for group in np.split(tokens, ends[:-1]):
            chosen = smallest_that_fits(group, shapes)
            if chosen is not None:
                masks.append(pack(group, chosen).padding_mask)
        expected = np.concatenate(masks).mean() if masks else None
        assert padding_waste(sizes, shapes) == (
            None if expected is None else pytest.approx(expected, abs=1e-12)
        )


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 20), min_size=5, max_size=60),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.05, 0.3]),
)
def test_the_fewest_sequences_that_meet_the_target_decide_the_tokens(lengths, per_step, target):
    capacity = PackedShape(2, 24)
    tokens = np.array(lengths)
    sizes = sizes_of(tokens, pack_in_order(tokens, capacity), capacity)
    result = recommend(sizes, capacity, microbatches_per_step=per_step, target=target)
    best = result.best
    assert best.fallback_share <= target
    assert best in result.outcomes
    shapes = [outcome.shape for outcome in result.outcomes]
    assert best.shape.max_packed_seqs == 32  # kernels take as long as for fewer
    assert shapes == sorted(shapes, key=lambda s: (s.max_packed_tokens, s.max_packed_seqs))
    fewest = {}
    for outcome in result.outcomes:
        if outcome.fallback_share <= target:
            fewest.setdefault(outcome.shape.max_packed_tokens, outcome)
    wastes = [o.padding_waste for o in fewest.values() if o.padding_waste is not None]
    chosen = fewest[best.shape.max_packed_tokens]
    assert chosen.padding_waste <= min(wastes) + 0.01
    for num_seqs in range(2, chosen.shape.max_packed_seqs):
        shape = PackedShape(num_seqs, chosen.shape.max_packed_tokens)
        assert evaluate(sizes, shape, per_step).fallback_share > target


def test_no_shape_holds_what_is_longer_than_the_capacity():
    capacity = PackedShape(2, 8)
    tokens = np.array([9, 9, 3, 3])
    sizes = sizes_of(tokens, pack_in_order(tokens, capacity), capacity)
    assert sizes.num_documents.tolist() == [1, 1, 2]
    assert recommend(sizes, capacity, microbatches_per_step=1, target=0.5).best is None
    assert recommend(sizes, capacity, microbatches_per_step=1, target=0.7).best is not None
