"""Values that depend only on padding are computed once per forward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.features.experts.padding import RowsOfForward, rows_within_capacity

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

_NUM_ROWS, _NUM_EXPERTS = 12, 4


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def _kept(padding: torch.Tensor, rows_of: Any, factor: float = 1.0) -> torch.Tensor:
    """Return the rows of a layer's experts, if all rows choose the first two experts."""
    probs = torch.zeros(_NUM_ROWS, _NUM_EXPERTS)
    probs[:, :2] = 0.5
    kept: torch.Tensor = rows_within_capacity(
        *(probs, probs > 0, rows_of.of(padding.reshape(-1))),
        top_k=2,
        capacity_factor=factor,
        by_position=False,
    )
    return kept


def _padding(num_tokens: int) -> torch.Tensor:
    return (torch.arange(_NUM_ROWS) >= num_tokens)[:, None]


def test_layers_of_a_forward_share_it(one_rank: Any) -> None:
    rows_of, padding = RowsOfForward(), _padding(6)
    with _Operators() as apart:
        alone = [_kept(padding, rows_of) for _ in range(3)]
    with _Operators() as together, rows_of.forward():
        shared = [_kept(padding, rows_of) for _ in range(3)]
        other = _kept(padding, rows_of, factor=2.0)  # layers need not be alike
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    assert (apart.counts["ceil"], together.counts["ceil"]) == (3, 2)
    assert (apart.counts["bitwise_not"], together.counts["bitwise_not"]) == (3, 1)
    assert (int(shared[0].sum()), int(other.sum())) == (_NUM_EXPERTS * 3, _NUM_EXPERTS * 6)


def test_nothing_is_known_of_another_padding(one_rank: Any) -> None:
    """Another tensor, a write to the tensor and another forward compute the values again."""
    rows_of, padding = RowsOfForward(), _padding(6)
    with rows_of.forward():
        assert int(_kept(padding, rows_of).sum()) == _NUM_EXPERTS * 3
        assert int(_kept(_padding(4), rows_of).sum()) == _NUM_EXPERTS * 2
        padding.copy_(_padding(8))
        assert int(_kept(padding, rows_of).sum()) == _NUM_EXPERTS * 4
    backend = RecorderBackend()
    with (
        backend.capture("forward", backend.new_pool("slot")) as graph,
        rows_of.forward(),
    ):
        held = [_kept(padding, rows_of) for _ in range(2)]
    for num_tokens in (4, 8, 2):
        padding.copy_(_padding(num_tokens))
        graph.replay()
        assert [int(kept.sum()) for kept in held] == [_NUM_EXPERTS * num_tokens // 2] * 2


def test_a_backward_computes_it_again(one_rank: Any) -> None:
    """The values of a forward's graph belong to its slot, and are gone in the backward."""
    rows_of, padding = RowsOfForward(), _padding(6)
    x = torch.ones(2, requires_grad=True)
    masks = []
    with rows_of.forward():
        masks.append(rows_of.of(padding))
        y = x * 2
        y.register_hook(lambda _: masks.append(rows_of.of(padding)))
        y.sum().backward()
        masks.append(rows_of.of(padding))
    assert masks[0] is masks[2]
    assert masks[0] is not masks[1]


def test_padding_that_was_made_in_inference_mode_is_read_again(one_rank: Any) -> None:
    """Such a tensor has no version counter."""
    rows_of = RowsOfForward()
    with torch.inference_mode(), rows_of.forward():
        padding = _padding(6)
        assert int(_kept(padding, rows_of).sum()) == _NUM_EXPERTS * 3
        padding.copy_(_padding(8))
        assert int(_kept(padding, rows_of).sum()) == _NUM_EXPERTS * 4
