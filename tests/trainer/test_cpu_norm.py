"""On a CPU with Transformer Engine installed, Megatron would add its norm after any layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]


def test_no_norm_that_needs_a_gpu_is_built(
    one_rank: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer import transformer_block

    from chunkgraph.settings import config_from_mapping
    from chunkgraph.trainer.model import build_model

    def needs_a_gpu(*_args: Any, **_options: Any) -> None:
        raise AssertionError("Transformer Engine's norm was built")

    monkeypatch.setattr(transformer_block, "LayerNormImpl", needs_a_gpu)
    config = config_from_mapping(make_config(model={"layer_spec": "user_specs:packed"}))
    (chunk,) = build_model(config, one_rank)
    (decoder,) = (m for m in chunk.modules() if isinstance(m, transformer_block.TransformerBlock))
    assert len(decoder.layers) == config.model.num_layers
    assert isinstance(decoder.final_layernorm, nn.LayerNorm)
