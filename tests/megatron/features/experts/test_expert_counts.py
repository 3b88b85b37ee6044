"""Counts of tokens per expert at the end of a forward, and the heaviest load."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chunkgraph.megatron.features.experts.counts import LOAD_OF, DropCounts, HeaviestLoad

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

CPU = torch.device("cpu")


def test_counts_of_layers_are_added_up_at_the_end_of_a_forward() -> None:
    counts = DropCounts(6, CPU)
    counts.add(5, torch.tensor([[True, False], [True, True]]))
    assert counts.total.tolist() == [0, 0, 0, 0, 0, 3]  # outside of a forward, added at once
    with counts.forward():
        counts.add(1, torch.tensor([0, 7, -1]))
        counts.add(2, torch.tensor([0, 0, 1]))
        counts.add(3, torch.tensor([2]))  # of another shape
        counts.add(3, torch.tensor([2]))  # a layer that runs twice
        counts.add(0, torch.tensor([True]))  # of another type and another layer
        assert counts.total.sum() == 3
    assert counts.total.tolist() == [1, 2, 1, 2, 0, 3]
    with pytest.raises(KeyError):
        _failing_forward(counts)
    with counts.forward():
        pass
    assert counts.total.tolist() == [1, 2, 1, 2, 0, 3]
    assert not counts.is_recomputed


def _failing_forward(counts: Any) -> None:
    with counts.forward():
        counts.add(4, torch.tensor([1]))
        raise KeyError("a layer")


def test_recomputation_in_a_backward_is_counted_there() -> None:
    counts = DropCounts(2, CPU)
    x = torch.ones(2, requires_grad=True)
    with counts.forward():
        y = x * 2
        y.register_hook(lambda _: counts.add(1, torch.tensor([1, 1])))
        y.sum().backward()  # within a forward, as in a partial recomputation
        assert (counts.total.tolist(), counts.is_recomputed) == ([0, 2], True)
    assert counts.total.tolist() == [0, 2]


def test_the_heaviest_load_is_relative_to_the_tokens() -> None:
    """Microbatches of several lengths: the longest need not be the least balanced."""
    load = HeaviestLoad()
    assert load.take() == 0
    load.add(3, torch.tensor(1))
    with load.measure():  # a rerun's load that was not taken does not reach the next one
        assert load.is_measured
    assert (load.is_measured, load.take()) == (False, 0)
    load.add(torch.tensor(0), torch.tensor(0))  # padding alone
    load.add(torch.tensor(4), torch.tensor(3))
    assert load.take() == 3 * LOAD_OF // 4
    for num_tokens, num_rows in ((64, 30), (16, 9), (16, 12), (64, 33), (0, 0)):
        load.add(num_tokens, torch.tensor(num_rows))
    assert load.take() == 12 * LOAD_OF // 16
    load.add(3, torch.tensor(1))
    assert load.take() == LOAD_OF // 3 + 1  # rounded up
    assert load.take() == 0
