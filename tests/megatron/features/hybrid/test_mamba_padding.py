"""Mamba layers clear the rows after packed documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chunkgraph.megatron.features.hybrid import rows_after_documents
from chunkgraph.packing import PackedShape, pack

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]


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
