from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from chunkgraph.errors import ConfigError
from chunkgraph.settings import StashConfig, config_from_mapping


def _config(stash: dict[str, Any], moe: Any = None, stages: int = 2, **model: Any) -> Any:
    shares = stash.pop("shared_slots", False)
    return config_from_mapping(
        {
            "pipeline": {"pipeline_model_parallel_size": stages},
            "capture": {"shared_slots": shares},
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
    ("stash", "moe", "model", "message"),
    [
        ({"max_bytes": -1}, {}, {}, "max_bytes is -1"),
        ({}, {"num_moe_experts": None}, {}, "only experts stash"),
        (
            {},
            {},
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
            "recomputed instead of saved",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(
    stash: dict[str, Any], moe: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(stash, moe, **model)


def test_every_key_becomes_a_flag_of_a_pretrain_script() -> None:
    from chunkgraph.launch.megatron_flags import flag_values

    changes = {"initial_bytes": 4096, "max_bytes": 1 << 20}
    assert set(changes) | {"enabled"} == {field.name for field in fields(StashConfig)}
    flags = flag_values(_config(changes, {"token_drops": "rerun"}), without_capture=False)
    by_key = {setting.key: (setting.flag, *setting.values) for setting in flags}
    assert by_key["moe.token_drops"] == ("--cuda-graph-token-drops", "rerun")
    assert by_key["stash.enabled"] == ("--cuda-graph-stash", "true")
    for key, value in changes.items():
        flag = f"--cuda-graph-stash-{key.replace('_', '-')}"
        assert by_key[f"stash.{key}"] == (flag, str(value))
    off = flag_values(_config({"enabled": False}), without_capture=False)
    assert not any("stash" in setting.key for setting in off)
