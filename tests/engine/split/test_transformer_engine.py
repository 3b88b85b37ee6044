"""Transformer Engine's own delayed weight gradients in the weight half."""

from __future__ import annotations

import pytest
import torch
from split_models import as_split, assert_equal, gradients, run_eagerly, run_split
from torch import nn

from chunkgraph.graphs import CUDABackend

# Imported before any test runs: a host can have two cuDNN libraries, and Transformer Engine cannot
# load its own after torch has loaded parts of the other.
te = pytest.importorskip("transformer_engine.pytorch")

SIZE = 64


def layers(*, delays: bool, is_fused: bool) -> nn.Module:
    settings = {
        "params_dtype": torch.bfloat16,
        "bias": False,
        "delay_wgrad_compute": delays,
        "fuse_wgrad_accumulation": is_fused,
    }
    torch.manual_seed(3)
    module = nn.Sequential(
        te.LayerNormLinear(SIZE, 2 * SIZE, **settings),
        nn.GELU(),
        te.Linear(2 * SIZE, SIZE, **settings),
        nn.Linear(SIZE, SIZE, dtype=torch.bfloat16),
        nn.GELU(),
    ).cuda()
    for parameter in module.parameters() if is_fused else ():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(_into_main_grad)
    return module


def _into_main_grad(parameter: torch.Tensor) -> None:
    if not parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


@pytest.mark.gpu
@pytest.mark.parametrize("is_fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("verify", ["none", "shadow"])
def test_delayed_weights_have_the_bits_of_those_that_are_not(
    monkeypatch: pytest.MonkeyPatch, verify: str, is_fused: bool
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    eager = layers(delays=False, is_fused=is_fused)
    module = layers(delays=True, is_fused=is_fused)
    graphs = as_split(module, CUDABackend(), verify=verify)
    inputs = [
        torch.randn(32, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(5)
    ]
    for lag in (0, 2, 1):  # the first step is eager
        assert_equal(run_split(graphs, inputs, lag), run_eagerly(eager, inputs))
        if is_fused:
            sums = [[p.main_grad for p in m.parameters()] for m in (module, eager)]
            assert_equal(sums[0], sums[1])
        else:
            assert_equal(gradients(module), gradients(eager))
    assert graphs.counters.weight_replays == 10
