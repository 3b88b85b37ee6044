"""Python state of Megatron's attention next to its kernels, in chunk graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from chunkgraph.megatron.core.capturing import _with_state

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(120)]

_DELTA = {
    "deterministic_mode": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 1,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@pytest.mark.slow
def test_checks_of_norms_and_gated_delta_nets_equal_eager_training(
    run_equal: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    def config(**model: Any) -> dict[str, Any]:
        return make_config(
            model={"num_layers": 2, "normalization": "RMSNorm", "swiglu": True, **model},
            train={"num_microbatches": [2, 1, 3]},
        )

    checked = {"qk_layernorm": True, "test_mode": True}
    cases = {
        "test_mode": {
            "config": config(normalization="LayerNorm", layer_spec="attention_specs:normalized"),
            "transformer_options": checked,
        },
        "gated_delta_net": {
            "config": config(layer_spec="attention_specs:gated_delta"),
            "transformer_options": _DELTA,
        },
    }
    for name, result in run_equal(cases, 1).items():
        assert all(step["replays"] > 0 for step in result["steps"][1:]), name


def _rule() -> Any:
    """Return Megatron's deterministic rule and the module that provides it."""
    from megatron.core.ssm import gated_delta_net

    return gated_delta_net.torch_chunk_gated_delta_rule


def _inputs(device: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = [(2, 70, 3, 8)] * 3 + [(2, 70, 3)] * 2
    query, key, value, decay, beta = (torch.rand(shape, device=device) for shape in shapes)
    return [query, key, value, -decay, beta]


def test_the_first_state_is_made_on_the_device() -> None:
    """No tensor comes from the host, and all bits are equal."""
    eager, inputs = _rule(), _inputs("cpu")
    expected, _ = eager(*inputs)
    unnamed = mock.Mock(side_effect=AssertionError("a tensor without a device"))
    zeros = torch.zeros
    with mock.patch.object(
        torch, "zeros", lambda *a, **k: zeros(*a, **k) if "device" in k else unnamed()
    ):
        with pytest.raises(AssertionError, match="without a device"):
            eager(*inputs)
        result, _ = _with_state(eager)(*inputs)
    assert torch.equal(result, expected)


@pytest.mark.gpu
def test_a_gpu_captures_the_gated_delta_rule() -> None:
    eager, inputs = _rule(), _inputs("cuda")
    expected, _ = eager(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, _ = _with_state(eager)(*inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
