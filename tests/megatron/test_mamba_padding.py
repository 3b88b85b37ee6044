"""Which rows of packed sequences Mamba layers clear."""

from __future__ import annotations

import pytest
import torch

from chunkgraph.packing import PackedShape, pack

pytestmark = pytest.mark.megatron


def test_which_rows_hold_no_token() -> None:
    """Behind the last document, behind each where they are padded, and with empty ones between."""
    from chunkgraph.megatron.compat import rows_without_token

    def found(offsets: list[int], padded: list[int] | None, first: int, num: int) -> list[int]:
        rows = None if padded is None else torch.tensor(padded, dtype=torch.int32)
        mask = rows_without_token(torch.tensor(offsets, dtype=torch.int32), rows, first, num)
        return (first + mask.nonzero().flatten()).tolist()

    assert found([0, 3, 5, 5, 5], [0, 3, 5, 8, 8], 0, 8) == [5, 6, 7]
    assert found([0, 3, 5, 5], None, 0, 8) == [5, 6, 7]
    assert found([0, 3, 3, 8], None, 0, 8) == []
    behind = rows_without_token(torch.tensor([0, 4]), torch.tensor([0, 4]), 0, 4, (1, 2))
    assert behind.tolist() == [False, False, True, True]
    assert found([0, 3, 3, 5, 5], [0, 4, 4, 8, 12], 0, 12) == [3, 6, 7, 8, 9, 10, 11]
    assert found([0, 3, 3, 5, 5], [0, 4, 4, 8, 12], 6, 6) == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_they_are_those_of_the_packing_on_every_rank(size: int) -> None:
    from chunkgraph.megatron.compat import rows_without_token

    shape = PackedShape(6, 64, context_parallel_size=size)
    for lengths in ([5, 11, 3], [1], [16, 16, 16, 16], [9, 1, 1, 1, 20]):
        packed = pack(lengths, shape)
        offsets, padded = map(torch.from_numpy, (packed.cu_seqlens, packed.cu_seqlens_padded))
        for rank in range(size):
            wanted = packed.padding_mask
            if size > 1:
                wanted = wanted[packed.rows_of_rank(rank)]
            found = rows_without_token(offsets, padded, 0, 64 // size, (rank, size))
            assert found.tolist() == wanted.tolist(), (lengths, rank)
            half = rows_without_token(offsets, padded, 32 // size, 32 // size, (rank, size))
            assert half.tolist() == wanted[32 // size :].tolist()
