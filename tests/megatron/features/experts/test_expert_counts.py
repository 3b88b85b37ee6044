"""Counts of rows without room, and the heaviest load."""

from __future__ import annotations

import pytest
import torch

from chunkgraph.megatron.features.experts.room import LOAD_OF, RowCounts

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

CPU = torch.device("cpu")


def test_the_heaviest_load_is_relative_to_the_tokens() -> None:
    """Microbatches of several lengths: the longest need not be the least balanced."""
    counts = RowCounts([1], CPU)
    assert counts.take_load() == 0
    counts.add_load(3, torch.tensor(1))
    with counts.measuring():  # a rerun's load that was not taken does not reach the next one
        assert counts.measures
    assert (counts.measures, counts.take_load()) == (False, 0)
    counts.add_load(torch.tensor(0), torch.tensor(0))  # padding alone
    counts.add_load(torch.tensor(4), torch.tensor(3))
    assert counts.take_load() == 3 * LOAD_OF // 4
    for num_tokens, num_rows in ((64, 30), (16, 9), (16, 12), (64, 33), (0, 0)):
        counts.add_load(num_tokens, torch.tensor(num_rows))
    assert counts.take_load() == 12 * LOAD_OF // 16
    counts.add_load(3, torch.tensor(1))
    assert counts.take_load() == LOAD_OF // 3 + 1  # rounded up
    assert counts.take_load() == 0
