"""HybridEP without the package: refusals, missing hardware, and its buffer."""

from __future__ import annotations

import math
import re
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refused import refused

from chunkgraph.engine import Chunk, ChunkGraphs, Host
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.megatron.core.access import import_megatron, patch_attributes
from chunkgraph.megatron.features.experts.dropless_experts import rebuilt_fused_operations
from chunkgraph.megatron.features.experts.hybrid_ep import HybridEPBuffer
from chunkgraph.megatron.features.experts.room import Room
from chunkgraph.megatron.rules.experts import MOE_RULES, PADDED_ROWS_RULES

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

HOLDS: dict[str, Any] = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_expert_rank_capacity_factor": 1.5,
    "use_transformer_engine_op_fuser": True,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "gated_linear_unit": True,
    "bf16": True,
    "expert_model_parallel_size": 2,
}
"""A model whose experts HybridEP serves."""

RANK_FACTOR = "moe_expert_rank_capacity_factor"


def test_a_budget_is_optional_and_asks_for_nothing_else() -> None:
    plain = {**HOLDS, "use_transformer_engine_op_fuser": False, "moe_grouped_gemm": False}
    for changes in ({}, {RANK_FACTOR: None}, {RANK_FACTOR: 0.5}):
        for token_drops in ("warn", "count", "raise", "rerun"):
            assert refused(MOE_RULES, {**plain, **changes}, token_drops=token_drops) == []
            assert refused(MOE_RULES, {**HOLDS, **changes}, token_drops=token_drops) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_flex_dispatcher_backend": "ncclep"}, "='ncclep': only HybridEP"),
        ({"moe_flex_dispatcher_backend": None}, "='deepep': only HybridEP"),  # Megatron's default
        ({"moe_expert_capacity_factor": 2.0}, "experts of a rank share its room"),
        ({"moe_pad_expert_input_to_capacity": True}, "leave it and moe_pad_expert"),
        ({"moe_router_dtype": None}, "moe_router_dtype=None.*'fp32'"),
        ({"bf16": False}, "bf16=False with .*rows of 2 bytes"),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "DeepEP pads quantized rows"),
        ({"recompute_granularity": "full"}, "recompute_granularity='full' with .*not supported"),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap=True with .*supported"),
        ({"moe_permute_fusion_into_hybridep": True}, "moe_permute_fusion_into_hybridep=True"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2"),
        ({"expert_model_parallel_size": 3}, "expert_model_parallel_size=3: it does not divide"),
        ({"moe_token_dispatcher_type": "alltoall"}, "factor=.* with .*'alltoall': it belongs"),
        ({"num_warmup_steps": 0}, "num_warmup_steps=0 with moe_flex_dispatcher_backend='hybridep'"),
        ({"splits_backward": True, "schedule": "zb-h1"}, "schedule='zb-h1' with .*not computed"),
    ],
)
def test_what_cannot_go_with_it_is_named(changes: dict[str, Any], message: str) -> None:
    reasons = refused(MOE_RULES, {**HOLDS, **changes, "captures": True}, token_drops="raise")
    assert any(re.search(message, why) for why in reasons), reasons


def test_quantized_experts_are_not_sent_from_one_refusal_to_the_next() -> None:
    other = {"fp8": "hybrid", "fp8_recipe": "blockwise", "moe_flex_dispatcher_backend": "deepep"}
    reasons = refused(MOE_RULES, {**HOLDS, **other, RANK_FACTOR: None, "captures": True})
    assert len(reasons) == 1
    assert "use moe_token_dispatcher_type='alltoall'" in reasons[0]


def test_packed_sequences_go_with_it() -> None:
    assert refused(PADDED_ROWS_RULES, HOLDS, pads_rows=True) == []
    fused = {**HOLDS, "moe_router_fusion": True}
    assert refused(PADDED_ROWS_RULES, fused) == []
    (reason,) = refused(PADDED_ROWS_RULES, fused, pads_rows=True)
    assert "moe_router_fusion=True" in reason
    others = {**HOLDS, "moe_token_dispatcher_type": "alltoall"}
    assert refused(PADDED_ROWS_RULES, others, pads_rows=True) == []  # experts take all tokens


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_budget_limits_rows_only_between_ranks(num_ranks: int) -> None:
    """With all experts on one rank nothing would report rows that it leaves out."""
    changes = {RANK_FACTOR: 0.5, "expert_model_parallel_size": num_ranks}
    config = SimpleNamespace(**{**HOLDS, **changes})
    factor = math.inf if num_ranks == 1 else 0.5 * config.moe_router_topk
    assert Room(config).factor == factor
    assert bool(Room(config).lacking) == (num_ranks > 1)


def test_a_replaced_buffer_stops_the_replays(one_rank: Any) -> None:
    watched = HybridEPBuffer()
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


def test_fused_operations_are_built_again_for_a_capture(one_rank: Any) -> None:
    """They hold parameters, which a capture replaces."""

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
