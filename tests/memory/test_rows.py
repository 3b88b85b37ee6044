"""Rows in use, computed in every layer of every microbatch with few operators."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

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
