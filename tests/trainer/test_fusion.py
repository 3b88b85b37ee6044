"""Transformer Engine's layers switch one by one to accumulation in their GEMM."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.trainer.fusion import fuse_weight_gradients


class Layer(nn.Linear):
    """Decides when it runs, as Transformer Engine's layers do."""

    def __init__(self, *, with_main_grad: bool = True) -> None:
        super().__init__(4, 4)
        self.fuse_wgrad_accumulation = False
        if with_main_grad:
            for parameter in self.parameters():
                parameter.main_grad = torch.zeros_like(parameter)


def test_every_such_layer_is_switched_on_and_no_other() -> None:
    chunk = nn.Sequential(Layer(), nn.Linear(4, 4), nn.Sequential(Layer()))
    assert fuse_weight_gradients([chunk]) == 2
    assert chunk[0].fuse_wgrad_accumulation
    assert chunk[2][0].fuse_wgrad_accumulation
    assert not hasattr(chunk[1], "fuse_wgrad_accumulation")


def test_frozen_weights_need_no_main_grad() -> None:
    frozen = Layer(with_main_grad=False).requires_grad_(False)
    assert fuse_weight_gradients([frozen]) == 1


def test_what_cannot_work_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="layer_spec=transformer_engine"):
        fuse_weight_gradients([nn.Linear(4, 4)])
    layer = Layer(with_main_grad=False)
    with pytest.raises(ConfigError, match=r"Layer\.weight has no main_grad.*wrap the model in DDP"):
        fuse_weight_gradients([sound := Layer(), layer])
    assert not sound.fuse_wgrad_accumulation
