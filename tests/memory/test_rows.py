"""Rows in use, computed in every layer of every microbatch with few operators."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.graphs import RecorderBackend
from chunkgraph.memory.stash import RowsInUse


@given(st.integers(0, 9), st.integers(0, 7), st.sampled_from([torch.int32, torch.int64]))
def test_leading_rows_are_the_first_in_use(count: int, num_rows: int, dtype: torch.dtype) -> None:
    first = RowsInUse.first(torch.tensor([count], dtype=dtype), num_rows)
    like = RowsInUse.of(torch.arange(num_rows) < count)
    expected = [place if place < count else -1 for place in range(num_rows)]
    for rows in (first, like) if num_rows else (first,):
        assert rows.places.tolist() == expected
        assert rows.total.tolist() == [min(count, num_rows)]
        assert (rows.places.dtype, rows.total.dtype) == (torch.int32, torch.int64)


@pytest.mark.parametrize(
    ("make", "num_operators"),
    [
        # Counts of 32 and of 64 bits: one of them needs no conversion.
        (lambda count: RowsInUse.first(count, 64), 4),
        (lambda count: RowsInUse.first(count.to(torch.int32), 64), 6),
        (lambda count: RowsInUse.of(count.expand(64) > 0), 5),
    ],
)
def test_rows_in_use_take_few_operators(
    make: Callable[[torch.Tensor], RowsInUse], num_operators: int
) -> None:
    backend, count = RecorderBackend(), torch.tensor([3])
    with backend.capture("rows", backend.new_pool("slot")) as graph:
        make(count)
    # The log also has changes of the grad mode, which are no operators.
    steps = [step for step in graph._steps or () if not isinstance(step, functools.partial)]
    assert len(steps) == num_operators
