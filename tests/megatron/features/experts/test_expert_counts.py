"""What is counted of tokens and experts: at the end of a forward, and how uneven they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

CPU = torch.device("cpu")


def test_what_layers_found_is_added_up_at_the_end_of_a_forward() -> None:
    from chunkgraph.megatron.features.experts.counts import DropCounts

    counts = DropCounts(6, CPU)
    counts.add(5, torch.tensor([[True, False], [True, True]]))
    assert counts.total.tolist() == [0, 0, 0, 0, 0, 3]  # outside of a forward at once
    with counts.forward():
        counts.add(1, torch.tensor([0, 7, -1]))
        counts.add(2, torch.tensor([0, 0, 1]))
        counts.add(3, torch.tensor([2]))  # of another shape
        counts.add(3, torch.tensor([2]))  # a layer that is run twice
        counts.add(0, torch.tensor([True]))  # of another type, and not the next layer
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


def test_what_is_computed_anew_in_a_backward_is_counted_there() -> None:
    from chunkgraph.megatron.features.experts.counts import DropCounts

    counts = DropCounts(2, CPU)
    x = torch.ones(2, requires_grad=True)
    with counts.forward():
        y = x * 2
        y.register_hook(lambda _: counts.add(1, torch.tensor([1, 1])))
        y.sum().backward()  # within a forward, as where only a part is computed again
        assert (counts.total.tolist(), counts.is_recomputed) == ([0, 2], True)
    assert counts.total.tolist() == [0, 2]


def test_the_heaviest_load_is_told_by_the_tokens_there_were() -> None:
    """Microbatches of several lengths: the longest need not be the least even one."""
    from chunkgraph.megatron.features.experts.counts import LOAD_OF, HeaviestLoad

    load = HeaviestLoad()
    assert load.take() == 0
    load.add(3, torch.tensor(1))
    with load.measure():  # a rerun whose load was not taken leaves none to the next
        assert load.is_measured
    assert (load.is_measured, load.take()) == (False, 0)
    load.add(torch.tensor(0), torch.tensor(0))  # nothing but padding
    load.add(torch.tensor(4), torch.tensor(3))
    assert load.take() == 3 * LOAD_OF // 4
    for num_tokens, asked in ((64, 30), (16, 9), (16, 12), (64, 33), (0, 0)):
        load.add(num_tokens, torch.tensor(asked))
    assert load.take() == 12 * LOAD_OF // 16
    load.add(3, torch.tensor(1))
    assert load.take() == LOAD_OF // 3 + 1  # rounded up
    assert load.take() == 0
