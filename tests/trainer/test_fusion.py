"""Transformer Engine's layers switch one by one to accumulation in their GEMM."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.trainer.model import fuse_weight_gradients


class Layer(nn.Linear):
    """Decides when it runs, as Transformer Engine's layers do."""

    def __init__(self, *, with_main_grad: bool = True) -> None:
        super().__init__(4, 4)
        self.fuse_wgrad_accumulation = False
        if with_main_grad:
            for parameter in self.parameters():
                parameter.main_grad = torch.zeros_like(parameter)


def test_every_such_layer_is_switched_on_and_no_other() -> None:
    frozen = Layer(with_main_grad=False).requires_grad_(False)
    chunk = nn.Sequential(Layer(), nn.Linear(4, 4), nn.Sequential(Layer()), frozen)
    fuse_weight_gradients([chunk])
    assert chunk[0].fuse_wgrad_accumulation
    assert chunk[2][0].fuse_wgrad_accumulation
    assert frozen.fuse_wgrad_accumulation
    assert not hasattr(chunk[1], "fuse_wgrad_accumulation")


def test_what_cannot_work_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="and DDP"):
        fuse_weight_gradients([sound := Layer(), Layer(with_main_grad=False)])
    assert not sound.fuse_wgrad_accumulation
