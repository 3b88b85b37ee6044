"""The models of ``chunkgraph train``: fields of Megatron's config, norms and fused gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.settings import config_from_mapping
from chunkgraph.trainer.model import _transformer_config, build_model


def _build(make_config: Callable[..., Any], **fields: Any) -> Any:
    config = config_from_mapping(make_config(model={"transformer_config": fields}))
    return _transformer_config(config, {})


@pytest.mark.megatron
def test_fields_replace_what_the_trainer_chooses(make_config: Callable[..., Any]) -> None:
    assert _build(make_config).hidden_dropout == 0.0
    built = _build(make_config, hidden_dropout=0.25, normalization="RMSNorm", layernorm_epsilon=1)
    assert (built.hidden_dropout, built.normalization) == (0.25, "RMSNorm")
    assert type(built.layernorm_epsilon) is float


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_dropuot": 0.1}, r"config\.hidden_dropuot: .* Did you mean 'hidden_dropout'\?"),
        ({"hidden_dropout": "much"}, r"hidden_dropout is 'much'; it must be a valid number"),
        ({"moe_router_score_function": "sigmod"}, r"is 'sigmod'; it must be 'softmax'"),
    ],
)
def test_a_wrong_field_is_named(
    make_config: Callable[..., Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _build(make_config, **fields)


@pytest.mark.megatron
@pytest.mark.every_release
def test_no_norm_that_needs_a_gpu_is_built(
    one_rank: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Transformer Engine is installed, Megatron would add its norm after any layers."""
    from megatron.core.transformer import transformer_block

    def needs_a_gpu(*_args: Any, **_options: Any) -> None:
        raise AssertionError("Transformer Engine's norm was built")

    monkeypatch.setattr(transformer_block, "LayerNormImpl", needs_a_gpu)
    config = config_from_mapping(make_config(model={"layer_spec": "user_specs:packed"}))
    (chunk,) = build_model(config, one_rank)
    (decoder,) = (m for m in chunk.modules() if isinstance(m, transformer_block.TransformerBlock))
    assert len(decoder.layers) == config.model.num_layers
    assert isinstance(decoder.final_layernorm, nn.LayerNorm)
