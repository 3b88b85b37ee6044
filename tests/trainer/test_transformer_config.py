"""`model.transformer_config`: any field of Megatron's TransformerConfig, checked by its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chunkgraph.errors import ConfigError

pytestmark = pytest.mark.megatron


def _build(make_config: Callable[..., Any], **fields: Any) -> Any:
    import torch

    from chunkgraph.settings import config_from_mapping
    from chunkgraph.trainer.model import _transformer_config

    config = config_from_mapping(make_config(model={"transformer_config": fields}))
    return _transformer_config(config, torch.device("cpu"), {})


def test_fields_replace_what_the_trainer_chooses(make_config: Callable[..., Any]) -> None:
    assert _build(make_config).hidden_dropout == 0.0
    built = _build(make_config, hidden_dropout=0.25, normalization="RMSNorm", layernorm_epsilon=1)
    assert (built.hidden_dropout, built.normalization) == (0.25, "RMSNorm")
    assert type(built.layernorm_epsilon) is float


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
