"""DeepEP's dispatchers without the package: refusals, missing hardware, and the budget."""

from __future__ import annotations

import functools
import re
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deep_ep_config import BACKENDS, HOLDS
from refused import refused

from chunkgraph.errors import ConfigError, ReplayMismatchError
from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.features.experts.refusals import MOE_RULES, PADDED_ROWS_RULES
from chunkgraph.megatron.features.rerun.rewind import StepState

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

RANK_FACTOR = "moe_expert_rank_capacity_factor"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_flex_dispatcher_backend": "ncclep"}, "ends the process"),
        ({"moe_flex_dispatcher_backend": "other"}, "'other': not known"),
        ({RANK_FACTOR: float("inf")}, f"{RANK_FACTOR}=inf with .*fixed shapes"),
        ({RANK_FACTOR: 0.5}, f"{RANK_FACTOR}=0.5 with .*: below 1"),
        ({"moe_expert_capacity_factor": 2.0}, "moe_expert_capacity_factor=2.0 with .*{name}"),
        ({"moe_pad_expert_input_to_capacity": True}, "leave it and moe_pad_expert"),
        ({"use_transformer_engine_op_fuser": False}, "use_transformer_engine_op_fuser=False"),
        ({"moe_grouped_gemm": False}, "moe_grouped_gemm=False"),
        ({"gated_linear_unit": False}, "gated_linear_unit=False"),
        ({"moe_router_dtype": None}, "moe_router_dtype=None.*'fp32'"),
        ({"bf16": False}, "bf16=False with .*rows of 2 bytes"),
        ({"fp8": "hybrid"}, "fp8='hybrid' with .*{name}.*not supported"),
        ({"recompute_granularity": "full"}, "recompute_granularity='full' with .*not supported"),
        ({"moe_permute_fusion_into_hybridep": True}, "moe_permute_fusion_into_hybridep=True"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2"),
        ({"expert_model_parallel_size": 3}, "expert_model_parallel_size=3: it does not divide"),
        (
            {"moe_token_dispatcher_type": "alltoall"},
            "rank_capacity_factor=.* with .*'alltoall': it belongs",
        ),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_go_with_it_is_named(
    backend: str, changes: dict[str, Any], message: str
) -> None:
    holds = {**HOLDS, "moe_flex_dispatcher_backend": backend}
    assert refused(MOE_RULES, holds, token_drops="raise") == []
    reasons = refused(MOE_RULES, {**holds, **changes}, token_drops="raise")
    message = message.replace("{name}", backend)
    assert any(re.search(message, why) for why in reasons), reasons


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 8192},
            "hidden_size=8192 with moe_flex_dispatcher_backend='deepep'",
        ),
        ({"hidden_size": 72}, "a multiple of 16"),
        ({"moe_router_topk": 33}, "moe_router_topk=33 with moe_flex"),
        ({"fp16": True}, "fp16=True with moe_flex"),
    ],
)
def test_what_deep_eps_own_kernels_cannot_take_is_named(
    changes: dict[str, Any], message: str
) -> None:
    small = {**HOLDS, "hidden_size": 64, **changes}
    assert refused(MOE_RULES, small, token_drops="raise") == []
    of_node = {**small, "moe_flex_dispatcher_backend": "deepep"}
    (reason,) = refused(MOE_RULES, of_node, token_drops="raise")
    assert message in reason


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        ({"moe_enable_deepep": True}, "moe_enable_deepep=True: the rows", "use {}"),
        ({"moe_token_dispatcher_type": "other"}, "'other': unknown", "use {}"),
        (
            {"splits_backward": True, "captures": True, RANK_FACTOR: None},
            "gradients that are not computed yet",
            "use a schedule that does not split backwards, or {}",
        ),
    ],
)
def test_a_remedy_is_the_dispatcher_that_needs_nothing_else(
    changes: dict[str, Any], message: str, remedy: str
) -> None:
    whole = {"schedule": "zb-h1", **HOLDS, **changes}
    (reason,) = [why for why in refused(MOE_RULES, whole, token_drops="rerun") if message in why]
    assert reason.endswith("; " + remedy.format("moe_token_dispatcher_type='alltoall'"))


@pytest.mark.parametrize("ranks", [1, 6, 16])
def test_deep_ep_itself_serves_some_numbers_of_ranks(ranks: int) -> None:
    changes = {"expert_model_parallel_size": ranks, "num_moe_experts": 48}
    assert refused(MOE_RULES, {**HOLDS, **changes}, token_drops="raise") == []
    # Megatron's default.
    default = {**HOLDS, **changes, "moe_flex_dispatcher_backend": None}
    (reason,) = refused(MOE_RULES, default, token_drops="raise")
    assert f"size={ranks} with moe_flex_dispatcher_backend='deepep'" in reason


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("token_drops", ["warn", "count"])
def test_tokens_are_never_dropped_silently(token_drops: str, backend: str) -> None:
    holds = {**HOLDS, "moe_flex_dispatcher_backend": backend}
    (reason,) = refused(MOE_RULES, holds, token_drops=token_drops)
    assert f"token_drops='{token_drops}' with moe_flex_dispatcher_backend='{backend}'" in reason
    assert refused(MOE_RULES, holds, token_drops="rerun") == []


_MEASURED = {**HOLDS, RANK_FACTOR: None, "use_transformer_engine_op_fuser": False}


def test_hybrid_ep_needs_no_budget_and_no_setting_of_one() -> None:
    plain = {**_MEASURED, "moe_grouped_gemm": False, "gated_linear_unit": False}
    for token_drops in ("warn", "count", "raise", "rerun"):
        assert refused(MOE_RULES, plain, token_drops=token_drops) == []
    of_node = {**_MEASURED, "moe_flex_dispatcher_backend": "deepep"}
    reasons = refused(MOE_RULES, of_node, token_drops="raise")
    assert any(re.search(f"{RANK_FACTOR}=None with .*fixed shapes", why) for why in reasons)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
            "moe_expert_capacity_factor=None: HybridEP pads quantized rows",
        ),
        ({"moe_expert_capacity_factor": 2.0}, "experts of a rank share its room"),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap=True with .*supported"),
        ({"moe_router_dtype": None}, "moe_router_dtype=None.*'fp32'"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2"),
        ({"schedule": "zb-h1", "splits_backward": True}, "schedule='zb-h1' with .*not computed"),
    ],
)
def test_what_cannot_go_without_a_budget_is_named(changes: dict[str, Any], message: str) -> None:
    (reason,) = refused(MOE_RULES, {**_MEASURED, **changes}, token_drops="raise")
    assert re.search(message, reason), reason


def test_packed_sequences_go_with_it() -> None:
    assert refused(PADDED_ROWS_RULES, HOLDS, pads_rows=True) == []
    fused = {**HOLDS, "moe_router_fusion": True}
    assert refused(PADDED_ROWS_RULES, fused) == []
    (reason,) = refused(PADDED_ROWS_RULES, fused, pads_rows=True)
    assert "moe_router_fusion=True" in reason
    others = {**HOLDS, "moe_token_dispatcher_type": "alltoall"}
    assert refused(PADDED_ROWS_RULES, others, pads_rows=True) == []  # experts take all tokens


def test_a_capture_without_eager_steps_is_refused() -> None:
    (reason,) = refused(MOE_RULES, HOLDS, token_drops="raise", num_warmup_steps=0)
    assert "num_warmup_steps=0 with moe_flex_dispatcher_backend='hybridep'" in reason


def test_flags_of_megatron_are_put_back_with_a_step_that_runs_again() -> None:
    """Otherwise Megatron's training loop would run the step once more."""
    from chunkgraph.megatron.features.experts.feature import Experts

    counts, flag = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    experts: Any = SimpleNamespace(_drops=SimpleNamespace(counts=counts, tensors=(counts, flag)))
    written = Experts.tensors.fget(experts)  # type: ignore[attr-defined]
    assert [t is w for t, w in zip(written, (counts, flag), strict=True)] == [True, True]
    state = StepState([], written)
    state.save()
    flag.fill_(True)
    counts.add_(3)
    state.restore()
    assert (flag.item(), counts.tolist()) == (False, [0, 0])


def test_training_on_a_cpu_offers_another_way(one_rank: Any, make_config: Any) -> None:
    from extended_config import build_model, config_from_mapping

    fields = ("moe_flex_dispatcher_backend", "moe_token_dispatcher_type", RANK_FACTOR)
    moe = {
        **{name: HOLDS[name] for name in (*fields, "moe_router_dtype", "moe_grouped_gemm")},
        "num_moe_experts": 4,
        "use_transformer_engine_op_fuser": True,
        "token_drops": "rerun",
    }
    config = config_from_mapping(
        make_config(model={"swiglu": True, "params_dtype": "bfloat16"}, moe=moe)
    )
    with pytest.raises(ConfigError, match=r"needs GPUs.*moe_token_dispatcher_type=alltoall"):
        build_model(config, one_rank)


NUM_RANKS, TOKENS, LOCAL = 2, 4, 3


def _layer(num_rows: torch.Tensor) -> Any:
    """Make a layer with a stand-in for HybridEP's dispatcher that needs ``num_rows`` rows."""
    from chunkgraph.megatron.core.access import private_names

    (base,) = private_names("megatron.core.transformer.moe.token_dispatcher", "_HybridEPManager")

    class Manager(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.config = SimpleNamespace(**HOLDS)
            self.moe_expert_rank_capacity_factor = 1.0
            self.over_budget = torch.zeros(1, dtype=torch.bool)
            self.handle: Any = None

        def setup_metadata(self, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
            factor = self.moe_expert_rank_capacity_factor
            self.num_permuted_tokens = None if factor is None else int(TOKENS * factor)

        def dispatch(self, hidden_states: torch.Tensor) -> torch.Tensor:
            num = NUM_RANKS * TOKENS
            place = torch.arange(num)[:, None] * LOCAL + torch.arange(LOCAL)
            # The first tokens fill the needed rows; later rows may hold anything.
            num_used = (num_rows + LOCAL - 1) // LOCAL
            chosen = torch.where(torch.arange(num)[:, None] < num_used, place < num_rows, True)
            flag = (num_rows > (self.num_permuted_tokens or 10**6)).to(torch.int32)
            self.handle = (*(None,) * 3, num_used, chosen, *(None,) * 5, flag)
            if self.num_permuted_tokens is None:
                return torch.zeros(int(num_rows), hidden_states.shape[1])
            return hidden_states * 2

    manager = Manager()
    return SimpleNamespace(
        layer_number=2,
        token_dispatcher=SimpleNamespace(_comm_manager=manager),
        config=manager.config,
        parameters=lambda: iter([torch.zeros(1)]),
    )


def test_what_a_rank_has_no_room_for_is_counted_in_replays(one_rank: Any) -> None:
    from chunkgraph.megatron.features.experts.rank_budget import RankBudget

    num_rows = torch.tensor([3])
    layer = _layer(num_rows)
    manager = layer.token_dispatcher._comm_manager
    budget = RankBudget([layer])
    undo = budget.install()

    def forward(x: torch.Tensor) -> torch.Tensor:
        with budget.counts.forward():
            manager.setup_metadata(x > 0, x)
            rows: torch.Tensor = manager.dispatch(x)
            return rows

    x = torch.ones(TOKENS, 2)
    backend = RecorderBackend()
    with backend.capture("forward", backend.new_pool("slot")) as graph:
        forward(x)
    counts = budget.counts.total
    counts.zero_()
    for rows, count in ((4, 0), (7, 1), (5, 2), (0, 2)):
        num_rows.fill_(rows)
        graph.replay()
        assert int(counts) == count
    assert budget.layers == (2,)
    undo()
    assert "dispatch" not in vars(manager)


def _num_operators(graph: Any) -> int:
    return sum(not isinstance(step, functools.partial) for step in graph._steps)


@pytest.mark.parametrize("num_layers", [1, 5])
def test_counting_adds_three_operators_to_a_chunk(one_rank: Any, num_layers: int) -> None:
    """For any number of layers: the forward's end adds up flags, without stacking a single one."""
    from chunkgraph.megatron.features.experts.rank_budget import RankBudget

    row_counts = [torch.tensor([0]) for _ in range(num_layers)]
    layers = [_layer(count) for count in row_counts]
    budget = RankBudget(layers)

    x = torch.ones(TOKENS, 2)

    def captured() -> Any:
        backend = RecorderBackend()
        with backend.capture("forward", backend.new_pool("slot")) as graph, budget.counts.forward():
            for manager in (layer.token_dispatcher._comm_manager for layer in layers):
                manager.setup_metadata(x > 0, x)
                manager.dispatch(x)
        return graph

    plain = captured()
    budget.install()
    graph = captured()
    # The log also has changes of the grad mode, which are no operators.
    assert _num_operators(graph) - _num_operators(plain) == (3 if num_layers > 1 else 2)
    budget.counts.total.zero_()
    for turn in range(3):
        for number, count in enumerate(row_counts):
            count.fill_(TOKENS + (number + turn) % 2)
        graph.replay()
    over = [sum((number + turn) % 2 for turn in range(3)) for number in range(num_layers)]
    assert budget.counts.total.tolist() == over


def test_room_is_for_all_where_nobody_would_hear_of_a_flag(one_rank: Any) -> None:
    from chunkgraph.megatron.features.experts.counts import LOAD_OF
    from chunkgraph.megatron.features.experts.rank_budget import RankBudget
    from chunkgraph.megatron.features.experts.room import RankRoom

    layer = _layer(torch.tensor([9]))
    manager = layer.token_dispatcher._comm_manager
    budget = RankBudget([layer])
    budget.install()
    counts = budget.counts.total
    x = torch.ones(TOKENS, 2)

    def rows() -> int | None:
        manager.setup_metadata(x > 0, x)
        manager.dispatch(x)
        num_rows: int | None = manager.num_permuted_tokens
        return num_rows

    assert (rows(), int(counts)) == (4, 1)
    with torch.no_grad():
        assert (rows(), int(counts)) == (None, 1)
    room = RankRoom(budget, layer.config)
    with room.for_all(), budget.load.measure():
        assert (rows(), int(counts)) == (None, 1)
    assert (rows(), int(counts)) == (4, 2)
    # 9 rows for 4 tokens; forwards with a budget do not count.
    assert (budget.load.take(), budget.load.take()) == (9 * LOAD_OF // TOKENS, 0)
    of_one = LOAD_OF // TOKENS
    room.give(10 * of_one)  # 4 tokens have 2 experts each: 8 rows are a factor of 1
    assert layer.config.moe_expert_rank_capacity_factor == 1.5  # never less than before
    room.give(14 * of_one)
    assert layer.config.moe_expert_rank_capacity_factor == pytest.approx(14 / 8 * 1.1)
    room.give(1000 * of_one)
    assert layer.config.moe_expert_rank_capacity_factor == 2.0  # room for all
    assert manager.moe_expert_rank_capacity_factor == 2.0


def test_a_replaced_buffer_stops_the_replays(one_rank: Any) -> None:
    from chunkgraph.megatron.core.access import import_megatron, patch_attributes
    from chunkgraph.megatron.features.experts.deep_ep_buffer import DeepEPBuffer

    watched = DeepEPBuffer(is_hybrid=True)
    limits = SimpleNamespace(max_num_of_tokens_per_rank=64)
    buffer = SimpleNamespace(configurer=SimpleNamespace(buffer_config=limits))
    module = import_megatron("megatron.core.transformer.moe.fused_a2a")
    undo = patch_attributes(module, {"_hybrid_ep_buffer": buffer})
    try:
        watched.check()  # nothing is captured
        watched.remember()
        watched.check()
        assert not watched.is_replaced()
        limits.max_num_of_tokens_per_rank = 128
        assert watched.is_replaced()  # a step's load is known at its end
        with pytest.raises(ReplayMismatchError, match="a pass had 128 tokens"):
            watched.check()
    finally:
        undo()


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_dispatcher_is_named(one_rank: Any, backend: str) -> None:
    from chunkgraph.megatron.features.experts.rank_budget import RankBudget

    layer = SimpleNamespace(
        layer_number=3,
        token_dispatcher=SimpleNamespace(_comm_manager=None),
        config=SimpleNamespace(moe_flex_dispatcher_backend=backend),
    )
    with pytest.raises(ConfigError, match="Layer 3 dispatches its tokens by NoneType"):
        RankBudget([layer])


def test_fused_operations_are_built_again_for_a_capture(one_rank: Any) -> None:
    """They hold parameters, which a capture replaces."""
    from chunkgraph.engine import Chunk, ChunkGraphs, Host
    from chunkgraph.megatron.features.experts.fused_operations import rebuilt_fused_operations

    class Layer(torch.nn.Linear):
        _fused_ops: Any

        def __init__(self) -> None:
            super().__init__(3, 3)
            self._fused_ops = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self._fused_ops is None:
                self._fused_ops = ((self.weight, self.bias),)
            weight, bias = self._fused_ops[0]
            return torch.nn.functional.linear(x, weight, bias)

    layer, x = Layer(), torch.randn(2, 3, requires_grad=True)
    layer(x).sum().backward()
    eager, held = layer.weight.grad, layer._fused_ops
    layer.zero_grad()
    chunk = Chunk.from_module(layer, "it")

    class NewOperations(Host):
        def capturing(self) -> AbstractContextManager[object]:
            return rebuilt_fused_operations(layer.modules())

    graphs = ChunkGraphs([chunk], [1], host=NewOperations())
    graphs.capture([(x,)])
    assert layer._fused_ops is held
    with graphs.step(1):
        graphs.callables[0](x).sum().backward()
    assert eager is not None
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, eager)
    graphs.release()
