"""DeepEP's dispatch of the worst case between two ranks: which expert is whose, and the way back.

Ranks are threads, which exchange rows by a stand-in of DeepEP's buffer with its contract: tokens
arrive by rank and token, experts are counted from 0 on every rank, and what nobody wrote is NaN.
"""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chunkgraph.megatron.features.experts.worst_case_dispatch import WorstCaseManager

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

RANKS, LOCAL, TOP_K, HIDDEN = 2, 3, 2, 4
TOKENS = (2, 9)
NAN = float("nan")


class Node:
    """What the ranks show each other."""

    def __init__(self) -> None:
        self._shown: list[Any] = [None] * RANKS
        self._meet = threading.Barrier(RANKS, timeout=20)

    def all_of(self, rank: int, mine: Any) -> list[Any]:
        self._shown[rank] = mine
        self._meet.wait()
        found = list(self._shown)
        self._meet.wait()
        return found


class Buffer:
    """As `deep_ep.Buffer` of one rank."""

    def __init__(self, node: Node, rank: int) -> None:
        self._node, self._rank = node, rank

    def get_dispatch_layout(self, indices: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert num_experts == RANKS * LOCAL
        is_in = [((indices // LOCAL == r) & (indices >= 0)).any(1) for r in range(RANKS)]
        return None, None, None, torch.stack(is_in, 1), None

    def dispatch(
        self, x: torch.Tensor, handle: Any = None, num_worst_tokens: int = 0, **given: Any
    ) -> tuple[Any, ...]:
        if handle is not None:
            shown = self._node.all_of(self._rank, x)
            rows = [shown[source][token] for source, token in handle[0]]
            return (self._filled(rows, handle[1], (HIDDEN,), NAN), *[None] * 5)
        mine = (x, given["topk_idx"], given["topk_weights"], given["is_token_in_rank"])
        shown = self._node.all_of(self._rank, mine)
        came = [
            (source, int(token))
            for source in range(RANKS)
            for token in shown[source][3][:, self._rank].nonzero()
        ]
        assert len(came) <= num_worst_tokens  # else DeepEP writes behind its memory
        local = [shown[source][1][token] - self._rank * LOCAL for source, token in came]
        is_here = [(place >= 0) & (place < LOCAL) for place in local]
        places = [p.masked_fill(~here, -1) for p, here in zip(local, is_here, strict=True)]
        weights = [
            shown[source][2][token].masked_fill(~here, 0.0)
            for (source, token), here in zip(came, is_here, strict=True)
        ]
        rows = [shown[source][0][token] for source, token in came]
        size = num_worst_tokens
        return (
            self._filled(rows, size, (HIDDEN,), NAN),
            self._filled(places, size, (TOP_K,), -1).long(),
            self._filled(weights, size, (TOP_K,), NAN),
            [],
            (came, size, x.shape[0]),
            None,
        )

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        came, size, num_tokens = handle
        assert x.shape[0] == size
        shown = self._node.all_of(self._rank, (x, topk_weights, came))
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
    made = WorstCaseManager(replaced)
    made._utils = importlib.import_module("permutation_stand_in").utils()
    buffer = Buffer(node, rank)
    made.buffer = lambda _: buffer  # type: ignore[method-assign]
    made._most_tokens = lambda num: max(node.all_of(rank, num))  # type: ignore[method-assign]
    return made


def _of_rank(node: Node, rank: int) -> dict[str, torch.Tensor]:
    """What comes back on one rank, its gradients, and what should have come."""
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
    found = manager.combine(rows * (expert + 1)[:, None] * of_rows[:, None])
    of_x, of_probs = torch.autograd.grad((found * weight).sum(), (x, probs))

    factors = torch.arange(1, RANKS * LOCAL + 1) * torch.where(chosen, probs, 0.0)
    wanted = x * factors.sum(1, keepdim=True)
    by_hand = torch.autograd.grad((wanted * weight).sum(), (x, probs))
    return {
        "out": torch.stack((found.detach(), wanted.detach())),
        "of x": torch.stack((of_x, by_hand[0])),
        "of probs": torch.stack((of_probs, by_hand[1])),
    }


def test_tokens_of_two_ranks_meet_their_experts_and_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks with different numbers of tokens, more than one of them counts on by itself."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "support"))
    node = Node()
    with ThreadPoolExecutor(RANKS) as threads:
        results = list(threads.map(lambda rank: _of_rank(node, rank), range(RANKS)))
    for rank, found in enumerate(results):
        for what, (got, wanted) in found.items():
            where = f"rank {rank}, {what}: "
            torch.testing.assert_close(got, wanted, msg=where.__add__)
