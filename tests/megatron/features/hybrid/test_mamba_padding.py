"""Mamba layers clear the rows after packed documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chunkgraph.megatron.features.hybrid.layers import rows_after_documents
from chunkgraph.packing import PackedShape, pack

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]


def test_which_rows_are_after_the_documents() -> None:
    """Padding and empty documents between documents are not cleared."""

    def tail_rows(offsets: list[int], padded: list[int] | None, first: int, num: int) -> list[int]:
        rows = None if padded is None else torch.tensor(padded, dtype=torch.int32)
        mask = rows_after_documents(torch.tensor(offsets, dtype=torch.int32), rows, first, num)
        return (first + mask.nonzero().flatten()).tolist()

    assert tail_rows([0, 3, 5, 5, 5], [0, 3, 5, 8, 8], 0, 8) == [5, 6, 7]
    assert tail_rows([0, 3, 5, 5], None, 0, 8) == [5, 6, 7]
    assert tail_rows([0, 3, 3, 8], None, 0, 8) == []
    assert tail_rows([0, 3, 3, 5, 5], [0, 4, 4, 8, 12], 0, 12) == [8, 9, 10, 11]
    assert tail_rows([0, 3, 3, 5, 5], [0, 4, 6, 10, 12], 6, 6) == [10, 11]
    assert tail_rows([0, 0], [0, 8], 0, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_they_are_the_tail_of_the_packing_on_every_rank(size: int) -> None:
    shape = PackedShape(6, 64, context_parallel_size=size)
    for lengths in ([5, 11, 3], [1], [16, 16, 16, 16], [9, 1, 1, 1, 20]):
        packed = pack(lengths, shape)
        offsets, padded = map(torch.from_numpy, (packed.cu_seqlens, packed.cu_seqlens_padded))
        tail = np.arange(64) >= packed.cu_seqlens_padded[len(lengths)]
        for rank in range(size):
            expected = tail if size == 1 else tail[packed.rows_of_rank(rank)]
            actual = rows_after_documents(offsets, padded, 0, 64 // size, size)
            assert actual.tolist() == expected.tolist(), (lengths, rank)
            half = rows_after_documents(offsets, padded, 32 // size, 32 // size, size)
            assert half.tolist() == expected[32 // size :].tolist()
