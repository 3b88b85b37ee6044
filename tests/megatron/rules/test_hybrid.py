"""The pattern of a hybrid model, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
from extended_config import config_from_mapping

from chunkgraph.errors import ChunkGraphError, ConfigError, TopologyError
from chunkgraph.settings import Config


def _config(
    pattern: str | None,
    pp: int = 1,
    vpp: int | None = None,
    *,
    model: dict[str, Any] | None = None,
    **sections: Any,
) -> Config:
    pipeline = {
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        **sections.pop("pipeline", {}),
    }
    return config_from_mapping(
        {
            "device": "cuda",
            "model": {
                "num_layers": 6,
                "hidden_size": 64,
                "ffn_hidden_size": 128,
                "num_attention_heads": 4,
                "seq_length": 32,
                "hybrid_layer_pattern": pattern,
                **(model or {}),
            },
            "pipeline": pipeline,
            "train": {"num_microbatches": [4]},
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("pattern", "pp", "vpp"),
    [
        ("M-M*M-", 1, None),
        ("M-M*M-", 2, None),
        ("M|-M*M-", 2, None),
        ("M|-|M*|M-", 2, 2),
        ("*-*-*-", 3, None),
    ],
)
def test_patterns(pattern: str, pp: int, vpp: int | None) -> None:
    assert _config(pattern, pp, vpp).model.hybrid_layer_pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "options", "error", "message"),
    [
        ("M-M*", {}, ConfigError, "the pattern has 4 layers, .* use 4"),
        ("M-MEM-", {}, ConfigError, "E stands for a layer with experts"),
        ("M-M*M-|", {"pp": 2}, TopologyError, "pattern: 2, of the pipeline: 2.*each with a layer"),
        ("M-M|*|M-", {"pp": 2}, TopologyError, "pattern: 3, of the pipeline: 2"),
        ("M-M*M-", {"pp": 2, "vpp": 2}, TopologyError, "pattern: 1, of the pipeline: 4"),
        ("M-M*M-", {"pp": 4}, TopologyError, "no | for equal stages"),
        ("M-M*M-", {"model": {"fp8": "hybrid"}}, ConfigError, "model.fp8 is hybrid with"),
    ],
)
def test_what_cannot_be(
    pattern: str, options: dict[str, Any], error: type[ChunkGraphError], message: str
) -> None:
    with pytest.raises(error, match=message):
        _config(pattern, **options)


def test_the_pattern_chooses_where_experts_are() -> None:
    moe = {"num_moe_experts": 4, "moe_expert_capacity_factor": 2.0}
    assert _config("M-MEM-", moe=moe).moe.num_moe_experts == 4
    with pytest.raises(ConfigError, match=r"the pattern decides .* leave the former out"):
        _config("M-MEM-", moe={**moe, "moe_layer_freq": [1] * 6})
