"""DeepEP's dispatch of the worst case without its package: the computations around it.

A stand-in for DeepEP's buffer serves one rank: tokens with an expert come first, and unwritten
rows are NaN.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import permutation_stand_in
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import ConfigError
from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.experts import worst_case_dispatch
from chunkgraph.megatron.features.experts.counts import LOAD_OF
from chunkgraph.megatron.features.experts.rank_budget import RankBudget
from chunkgraph.megatron.features.experts.worst_case_dispatch import WorstCaseManager, rows_within

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

TOKENS, HIDDEN, EXPERTS, TOP_K = 7, 4, 5, 2


class OneRank:
    """`deep_ep.Buffer` for one rank, without state between calls."""

    def __init__(self, group: object, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert num_rdma_bytes == 0
        self.group, self.num_nvl_bytes = group, num_nvl_bytes
        self.most_tokens = 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda size, _: size * num_ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, indices: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert num_experts == EXPERTS
        return None, None, None, (indices >= 0).any(1, keepdim=True), None

    def dispatch(
        self, x: torch.Tensor, handle: Any = None, **options: torch.Tensor | int
    ) -> tuple[Any, ...]:
        if handle is not None:
            (sent,) = handle
            return self._moved(x, sent), None, None, None, None, None
        is_sent: Any = options["is_token_in_rank"]
        worst: Any = options["num_worst_tokens"]
        assert worst >= x.shape[0]
        self.most_tokens = max(self.most_tokens, worst)
        sent = is_sent[:, 0]
        places = self._moved(options["topk_idx"], sent, -1)
        weights = self._moved(options["topk_weights"], sent)
        return self._moved(x, sent), places, weights, [], (sent,), None

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        (sent,) = handle
        weights = None if topk_weights is None else self._back(topk_weights, sent)
        return self._back(x, sent), weights, None

    def _moved(self, tensor: Any, sent: torch.Tensor, rest: float = float("nan")) -> torch.Tensor:
        order = torch.argsort(~sent, stable=True)
        is_unwritten = torch.arange(len(sent)) >= sent.sum()
        return tensor[order].masked_fill(is_unwritten[:, None], rest)

    def _back(self, tensor: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(~sent, stable=True)
        out = torch.empty_like(tensor)
        out[order] = tensor
        return out.masked_fill(~sent[:, None], 0.0)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> WorstCaseManager:
    replaced = SimpleNamespace(
        group=SimpleNamespace(size=lambda: 1),
        config=SimpleNamespace(
            moe_router_topk=TOP_K,
            moe_expert_rank_capacity_factor=None,
            use_transformer_engine_op_fuser=False,
        ),
        num_local_experts=EXPERTS,
        num_experts=EXPERTS,
        router_topk=TOP_K,
    )
    result = WorstCaseManager(replaced)
    result._fused = SimpleNamespace(
        Buffer=OneRank, _buffer=None, get_hidden_bytes=lambda x: x.shape[1] * 4
    )
    result._utils = permutation_stand_in.utils()
    monkeypatch.setattr(result, "_most_tokens", lambda num_tokens: num_tokens)
    return result


def _routed(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw experts and probabilities: one token has no expert, one has a probability of 0."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(TOP_K).indices, value=True)
    chosen[3] = False
    probs = torch.where(chosen, scores, 0.0)
    probs[5, int(chosen[5].nonzero()[0])] = 0.0
    return chosen, probs


def _through(
    manager: WorstCaseManager, x: torch.Tensor, chosen: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """Run the experts: expert e multiplies a row by e + 1 and by the row's probability."""
    manager.setup_metadata(chosen, probs)
    rows, weights = manager.get_permuted_hidden_states_by_experts(manager.dispatch(x))
    counts, of_rows = manager.get_number_of_tokens_per_expert(), torch.arange(rows.shape[0])
    assert counts is not None
    assert weights is not None
    expert = torch.searchsorted(counts.cumsum(0), of_rows, right=True)
    done = rows * (expert + 1)[:, None] * weights[:, None]
    return manager.combine(manager.get_restored_hidden_states_by_experts(done))


def test_what_comes_back_is_what_experts_make_of_each_token(manager: WorstCaseManager) -> None:
    chosen, probs = _routed(0)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float32).requires_grad_()
    probs.requires_grad_()
    result = _through(manager, x, chosen, probs)
    factors = torch.arange(1, EXPERTS + 1) * torch.where(chosen, probs, 0.0)
    expected = x * factors.sum(1, keepdim=True)
    torch.testing.assert_close(result, expected)
    weight = torch.randn(TOKENS, HIDDEN)
    of_x, of_probs = torch.autograd.grad((result * weight).sum(), (x, probs), retain_graph=True)
    expected_grads = torch.autograd.grad((expected * weight).sum(), (x, probs))
    torch.testing.assert_close(of_x, expected_grads[0])
    torch.testing.assert_close(of_probs, expected_grads[1])
    assert of_probs[5].count_nonzero() == TOP_K  # an expert at probability 0 is still chosen
    assert manager.is_over is None
    assert manager.num_permuted_tokens == int(chosen.sum())  # as many as arrived


def test_a_rank_that_receives_nothing_has_a_row(manager: WorstCaseManager) -> None:
    chosen, probs = _routed(0)
    x = torch.randn(TOKENS, HIDDEN)
    result = _through(manager, x, torch.zeros_like(chosen), torch.zeros_like(probs))
    assert manager.num_permuted_tokens == 1
    assert result.count_nonzero() == 0


def test_there_is_room_for_the_tokens_of_a_rank_that_has_more(
    manager: WorstCaseManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepEP writes as many rows as arrive, for any size of the buffer."""
    monkeypatch.setattr(manager, "_most_tokens", lambda num_tokens: num_tokens + 4)
    chosen, probs = _routed(0)
    _through(manager, torch.randn(TOKENS, HIDDEN), chosen, probs)
    assert manager._fused._buffer.most_tokens == TOKENS + 4


def test_rows_are_as_many_as_the_product_wants(manager: WorstCaseManager) -> None:
    manager._utils.get_align_size_for_quantization = lambda _: 8
    chosen, probs = _routed(0)
    for factor, rows in ((None, 16), (0.5, 8), (1.0, 16), (9.0, 16)):
        manager.moe_expert_rank_capacity_factor = factor
        _through(manager, torch.randn(TOKENS, HIDDEN), chosen, probs)
        assert manager.num_permuted_tokens == rows  # 14, or the 12 that arrived, and up to 7 more
        assert (manager.is_over is None) == (factor != 0.5)


def test_one_buffer_serves_until_rows_are_wider(manager: WorstCaseManager) -> None:
    one = manager.buffer(torch.zeros(3, HIDDEN))
    assert manager.buffer(torch.zeros(9, HIDDEN)) is one  # for any number of tokens
    assert manager._fused._buffer is one  # where Megatron expects it
    wider = manager.buffer(torch.zeros(3, 2 * HIDDEN))
    assert wider is not one
    assert manager.buffer(torch.zeros(3, HIDDEN)) is wider


def test_rows_without_room_are_left_out_and_reported_in_replays(manager: WorstCaseManager) -> None:
    manager.moe_expert_rank_capacity_factor = 10 / (TOKENS * TOP_K)
    layer = SimpleNamespace(
        layer_number=3,
        token_dispatcher=SimpleNamespace(_comm_manager=manager),
        config=SimpleNamespace(moe_flex_dispatcher_backend="deepep"),
        parameters=lambda: iter([torch.zeros(1)]),
    )
    budget = RankBudget([layer])
    undo = budget.install()
    chosen, probs = _routed(1)
    x = torch.randn(TOKENS, HIDDEN)
    backend = RecorderBackend()
    with (
        backend.capture("forward", backend.new_pool("slot")) as graph,
        budget.counts.forward(),
        torch.enable_grad(),
    ):
        result = _through(manager, x, chosen, probs)
    total = budget.counts.total
    assert budget.tensors == (total,)
    total.zero_()
    for seed in range(2, 5):
        again, others = _routed(seed)
        if seed == 3:  # 8 rows are enough
            again[[0, 1]] = False
            others = torch.where(again, others, 0.0)
        chosen.copy_(again)
        probs.copy_(others)
        before = int(total)
        graph.replay()
        assert int(total) - before == (0 if seed == 3 else 1)
        assert manager.num_rows_sent is not None
        assert int(manager.num_rows_sent) == int(again.sum())
        kept, _, _ = rows_within(again, 10)
        factors = torch.arange(1, EXPERTS + 1) * torch.where(kept, others, 0.0)
        torch.testing.assert_close(result, x * factors.sum(1, keepdim=True))
    factors = torch.arange(1, EXPERTS + 1) * torch.where(chosen, probs, 0.0)
    before = int(total)
    with budget.room_for_all(), budget.load.measure():
        whole = _through(manager, x, chosen, probs)
    torch.testing.assert_close(whole, x * factors.sum(1, keepdim=True))
    assert budget.load.take() == -(-int(chosen.sum()) * LOAD_OF // TOKENS)
    assert manager.num_rows_sent is not None
    assert manager.num_rows_sent.untyped_storage().nbytes() == 4  # and nothing else
    undo()
    assert manager.num_rows_sent is None
    with torch.no_grad():  # nothing counts without gradients, even after `undo`
        whole = _through(manager, x, chosen, probs)
    torch.testing.assert_close(whole, x * factors.sum(1, keepdim=True))
    assert int(total) == before
    budget.restore_managers()
    assert layer.token_dispatcher._comm_manager is manager  # the original manager


@given(
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=9),
    st.integers(1, 30),
)
def test_experts_get_room_one_by_one(rows: list[list[bool]], budget: int) -> None:
    chosen = torch.tensor(rows)
    kept, counts, num_required = rows_within(chosen, budget)
    order = [(e, r) for e in range(3) for r in range(len(rows)) if rows[r][e]]
    assert int(num_required) == len(order)
    assert {(e, r) for r, e in kept.nonzero().tolist()} == set(order[:budget])
    assert counts.tolist() == [sum(e == of for of, _ in order[:budget]) for e in range(3)]


class _Megatrons:
    """Stand in for Megatron's manager, which needs the package."""

    def __init__(self, num_ranks: int) -> None:
        self.group = SimpleNamespace(size=lambda: num_ranks)
        self.config = SimpleNamespace(moe_expert_rank_capacity_factor=2.0)
        self.num_local_experts, self.num_experts, self.router_topk = 2, 4, 2


def _layers(*managers: object) -> list[Any]:
    return [
        SimpleNamespace(layer_number=i, token_dispatcher=SimpleNamespace(_comm_manager=m))
        for i, m in enumerate(managers, 1)
    ]


def test_layers_get_it_and_get_theirs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_megatron("megatron.core.transformer.moe.token_dispatcher")
    monkeypatch.setattr(module, "_DeepepManager", _Megatrons)
    theirs = _Megatrons(2), _Megatrons(2)
    layers = _layers(*theirs)
    undo = worst_case_dispatch.use_worst_case_dispatch(layers)
    managers = [layer.token_dispatcher._comm_manager for layer in layers]
    assert all(isinstance(manager, WorstCaseManager) for manager in managers)
    assert managers[0].moe_expert_rank_capacity_factor == 2.0
    worst_case_dispatch.use_worst_case_dispatch(layers)()  # they already have it
    assert [layer.token_dispatcher._comm_manager for layer in layers] == managers
    undo()
    assert [layer.token_dispatcher._comm_manager for layer in layers] == list(theirs)


@pytest.mark.parametrize(
    ("managers", "message"),
    [
        ((_Megatrons(2), _Megatrons(16)), "Layer 2 shares its experts between 16 ranks"),
        ((_Megatrons(2), object()), "Layer 2 dispatches its tokens by object"),
    ],
)
def test_what_it_cannot_serve_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, managers: tuple[object, ...], message: str
) -> None:
    module = import_megatron("megatron.core.transformer.moe.token_dispatcher")
    monkeypatch.setattr(module, "_DeepepManager", _Megatrons)
    layers = _layers(*managers)
    with pytest.raises(ConfigError, match=message):
        worst_case_dispatch.use_worst_case_dispatch(layers)
    assert [layer.token_dispatcher._comm_manager for layer in layers] == list(managers)
