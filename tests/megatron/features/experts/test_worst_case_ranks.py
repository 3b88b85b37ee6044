"""DeepEP's dispatch of the worst case between two ranks: to their experts and back.

Ranks are threads. A stand-in for DeepEP's buffer exchanges rows under its contract: tokens arrive
ordered by rank and token, every rank numbers its experts from 0, and unwritten rows are NaN.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import permutation_stand_in
import pytest
import torch

from chunkgraph.megatron.features.experts.worst_case_dispatch import WorstCaseManager

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

RANKS, LOCAL, TOP_K, HIDDEN = 2, 3, 2, 4
TOKENS = (2, 9)
NAN = float("nan")


class Node:
    """Exchanges values between the ranks."""

    def __init__(self) -> None:
        self._shown: list[Any] = [None] * RANKS
        self._meet = threading.Barrier(RANKS, timeout=20)

    def all_of(self, rank: int, mine: Any) -> list[Any]:
        self._shown[rank] = mine
        self._meet.wait()
        values = list(self._shown)
        self._meet.wait()
        return values


class Buffer:
    """Stands for `deep_ep.Buffer` of one rank."""

    def __init__(self, node: Node, rank: int) -> None:
        self._node, self._rank = node, rank

    def get_dispatch_layout(self, indices: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert num_experts == RANKS * LOCAL
        is_in = [((indices // LOCAL == r) & (indices >= 0)).any(1) for r in range(RANKS)]
        return None, None, None, torch.stack(is_in, 1), None

    def dispatch(
        self, x: torch.Tensor, handle: Any = None, num_worst_tokens: int = 0, **options: Any
    ) -> tuple[Any, ...]:
        if handle is not None:
            shown = self._node.all_of(self._rank, x)
            rows = [shown[source][token] for source, token in handle[0]]
            return (self._filled(rows, handle[1], (HIDDEN,), NAN), *[None] * 5)
        mine = (x, options["topk_idx"], options["topk_weights"], options["is_token_in_rank"])
        shown = self._node.all_of(self._rank, mine)
        arrivals = [
            (source, int(token))
            for source in range(RANKS)
            for token in shown[source][3][:, self._rank].nonzero()
        ]
        assert len(arrivals) <= num_worst_tokens  # otherwise DeepEP writes beyond its memory
        local = [shown[source][1][token] - self._rank * LOCAL for source, token in arrivals]
        is_here = [(place >= 0) & (place < LOCAL) for place in local]
        places = [p.masked_fill(~here, -1) for p, here in zip(local, is_here, strict=True)]
        weights = [
            shown[source][2][token].masked_fill(~here, 0.0)
            for (source, token), here in zip(arrivals, is_here, strict=True)
        ]
        rows = [shown[source][0][token] for source, token in arrivals]
        size = num_worst_tokens
        return (
            self._filled(rows, size, (HIDDEN,), NAN),
            self._filled(places, size, (TOP_K,), -1).long(),
            self._filled(weights, size, (TOP_K,), NAN),
            [],
            (arrivals, size, x.shape[0]),
            None,
        )

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        arrivals, size, num_tokens = handle
        assert x.shape[0] == size
        shown = self._node.all_of(self._rank, (x, topk_weights, arrivals))
        out = torch.zeros(num_tokens, HIDDEN)
        weights = None if topk_weights is None else torch.zeros(num_tokens, TOP_K)
        for rows, of_rows, theirs in shown:
            for row, (source, token) in enumerate(theirs):
                if source == self._rank:
                    out[token] += rows[row]
                    if weights is not None:
                        weights[token] += of_rows[row]
        return out, weights, None

    @staticmethod
    def _filled(
        rows: list[torch.Tensor], size: int, shape: tuple[int, ...], rest: float
    ) -> torch.Tensor:
        out = torch.full((size, *shape), rest)
        for index, row in enumerate(rows):
            out[index] = row
        return out


def _manager(node: Node, rank: int) -> WorstCaseManager:
    replaced = SimpleNamespace(
        group=SimpleNamespace(size=lambda: RANKS),
        config=SimpleNamespace(
            moe_router_topk=TOP_K,
            moe_expert_rank_capacity_factor=None,
            use_transformer_engine_op_fuser=False,
        ),
        num_local_experts=LOCAL,
        num_experts=RANKS * LOCAL,
        router_topk=TOP_K,
    )
    result = WorstCaseManager(replaced)
    result._utils = permutation_stand_in.utils()
    buffer = Buffer(node, rank)
    result.buffer = lambda _: buffer  # type: ignore[method-assign]
    result._most_tokens = lambda num: max(node.all_of(rank, num))  # type: ignore[method-assign]
    return result


def _of_rank(node: Node, rank: int) -> dict[str, torch.Tensor]:
    """Return one rank's results and gradients, each with the expected ones."""
    generator = torch.Generator().manual_seed(rank)
    num = TOKENS[rank]
    scores = torch.rand(num, RANKS * LOCAL, generator=generator)
    chosen = torch.zeros(num, RANKS * LOCAL, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(TOP_K).indices, value=True)
    chosen[1] = False  # padding
    probs = torch.where(chosen, scores, 0.0).requires_grad_()
    x = torch.randn(num, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(num, HIDDEN, generator=generator)

    manager = _manager(node, rank)
    manager.setup_metadata(chosen, probs)
    rows, of_rows = manager.get_permuted_hidden_states_by_experts(manager.dispatch(x))
    counts, place = manager.get_number_of_tokens_per_expert(), torch.arange(rows.shape[0])
    assert counts is not None
    assert of_rows is not None
    expert = rank * LOCAL + torch.searchsorted(counts.cumsum(0), place, right=True)
    result = manager.combine(rows * (expert + 1)[:, None] * of_rows[:, None])
    of_x, of_probs = torch.autograd.grad((result * weight).sum(), (x, probs))

    factors = torch.arange(1, RANKS * LOCAL + 1) * torch.where(chosen, probs, 0.0)
    expected = x * factors.sum(1, keepdim=True)
    by_hand = torch.autograd.grad((expected * weight).sum(), (x, probs))
    return {
        "out": torch.stack((result.detach(), expected.detach())),
        "of x": torch.stack((of_x, by_hand[0])),
        "of probs": torch.stack((of_probs, by_hand[1])),
    }


def test_tokens_of_two_ranks_meet_their_experts_and_come_back() -> None:
    """Ranks have different numbers of tokens, more than one of them would expect by itself."""
    node = Node()
    with ThreadPoolExecutor(RANKS) as threads:
        results = list(threads.map(lambda rank: _of_rank(node, rank), range(RANKS)))
    for rank, pairs in enumerate(results):
        for what, (actual, expected) in pairs.items():
            where = f"rank {rank}, {what}: "
            torch.testing.assert_close(actual, expected, msg=where.__add__)
