"""Which rows of packed sequences Mamba layers clear."""

from __future__ import annotations

import pytest
import torch

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
    assert found([0, 3, 3, 5, 5], [0, 4, 4, 8, 12], 0, 12) == [3, 6, 7, 8, 9, 10, 11]
    assert found([0, 3, 3, 5, 5], [0, 4, 4, 8, 12], 6, 6) == [6, 7, 8, 9, 10, 11]
