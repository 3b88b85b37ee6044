"""Routers without a capacity, as with HybridEP, route only tokens of packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping

from chunkgraph.megatron import keep_padding_from_experts
from chunkgraph.megatron.attachment import config_of
from chunkgraph.megatron.features.experts.state import (
    forget_expert_metrics,
    routers_of,
    take_expert_metrics,
)
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

_NUM_TOKENS, _NUM_ROWS = 24, 32


@pytest.fixture
def make_chunk(
    one_rank: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Any]:
    """Make a model with experts, from the same seed every time."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    config = config_from_mapping(
        make_config(
            model={"num_layers": 2, "layer_spec": "user_specs:packed_experts", "swiglu": True},
            moe={
                "num_moe_experts": 4,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": 32,
                "moe_expert_capacity_factor": None,
                "moe_pad_expert_input_to_capacity": False,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_load_balancing_type": "seq_aux_loss",
                "moe_aux_loss_coeff": 0.5,
                "moe_z_loss_coeff": 0.1,
            },
            capture={"enabled": False},
        )
    )

    def make() -> Any:
        forget_expert_metrics()
        seed_everything(1, one_rank)
        (chunk,) = build_model(config, one_rank)
        return chunk

    return make


def _routed(chunk: Any, *, is_padded: bool) -> dict[str, torch.Tensor]:
    """Return a router's results and counts for the same tokens, with padding after them or not."""
    undo = keep_padding_from_experts(chunk, config_of(chunk))
    router = routers_of(list(chunk.modules()))[0]
    router.weight.main_grad.zero_()
    torch.manual_seed(3)
    tokens = torch.randn(_NUM_TOKENS, 1, 32)
    padding = None
    if is_padded:
        tokens = torch.cat([tokens, torch.zeros(_NUM_ROWS - _NUM_TOKENS, 1, 32)])
        padding = torch.arange(_NUM_ROWS)[:, None] >= _NUM_TOKENS
    probs, chosen = router(tokens, padding)
    probs.square().sum().backward()
    undo()
    assert not chosen[_NUM_TOKENS:].any()
    assert not probs[_NUM_TOKENS:].any()
    return {
        "probs": probs[:_NUM_TOKENS].detach(),
        "chosen": chosen[:_NUM_TOKENS].float(),
        "gradient": router.weight.main_grad.clone(),
        "counts": router.local_tokens_per_expert.clone(),
        **{name: torch.tensor(v) for name, v in take_expert_metrics().items()},
    }


def test_rows_without_a_token_are_in_no_map_and_no_loss(make_chunk: Callable[[], Any]) -> None:
    without = _routed(make_chunk(), is_padded=False)
    padded = _routed(make_chunk(), is_padded=True)
    assert without.keys() == padded.keys() >= {"seq_load_balancing_loss", "z_loss"}
    assert without["chosen"].sum(1).tolist() == [2] * _NUM_TOKENS
    assert without["counts"].sum() == 2 * _NUM_TOKENS
    for name, value in without.items():
        assert value.any(), name
        assert torch.allclose(padded[name], value, rtol=1e-5, atol=1e-7), name
