from __future__ import annotations

from typing import Any

import pytest

from chunkgraph.config import config_from_mapping
from chunkgraph.errors import ConfigError


def _config(stash: dict[str, Any], moe: Any = None, **model: Any) -> Any:
    return config_from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "ffn_hidden_size": 64,
                "num_attention_heads": 4,
                "seq_length": 16,
                **model,
            },
            "train": {"num_microbatches": [2]},
            "moe": {"num_moe_experts": 8, "moe_expert_capacity_factor": 1.5, **(moe or {})},
            "stash": {"enabled": True, **stash},
        }
    )


@pytest.mark.parametrize(
    ("stash", "moe", "model", "said"),
    [
        ({"page_bytes": 100}, {}, {}, "page_bytes is 100"),
        ({"page_bytes": 0}, {}, {}, "page_bytes is 0"),
        ({"headroom": 0}, {}, {}, "headroom is 0"),
        ({"initial_bytes": -1}, {}, {}, "initial_bytes is -1"),
        ({"max_recaptures": -1}, {}, {}, "max_recaptures is -1"),
        ({}, {"num_moe_experts": None}, {}, "only experts stash"),
        (
            {},
            {},
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
            "recomputed already",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(
    stash: dict[str, Any], moe: dict[str, Any], model: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        _config(stash, moe, **model)


def test_a_pretrain_script_gets_no_stash_without_a_word() -> None:
    from chunkgraph.megatron.launch_settings import settings_of

    with pytest.raises(ConfigError, match=r"stash\.enabled"):
        settings_of(_config({}), without_capture=False)
    with pytest.raises(ConfigError, match="token_drops is rerun"):
        settings_of(_config({"enabled": False}, {"token_drops": "rerun"}), without_capture=False)
