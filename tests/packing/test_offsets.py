from __future__ import annotations

import numpy as np
import pytest

from chunkgraph.errors import PackingError
from chunkgraph.packing import PackedShape, check_offsets, pack


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_good_offsets_are_accepted():
    check_offsets(int32(0, 3, 4, 9), 9)
    check_offsets(int32(0, 3, 3, 9, 9), 9)


def test_lists_that_make_no_array():
    with pytest.raises(PackingError, match="rank 2: cu_seqlens must be a list of integers; these"):
        check_offsets([[0], [1, 2]], 8, "rank 2")
    with pytest.raises(PackingError, match="rank 2: document lengths must be a list of integers;"):
        pack([[1], [1, 2]], PackedShape(4, 8), where="rank 2")


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
