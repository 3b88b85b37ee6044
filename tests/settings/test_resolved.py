"""A run's saved settings have the value of every default that depends on other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from small_settings import SMALL

from chunkgraph.settings import Config, config_from_mapping, load_config, resolved, to_yaml

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*/*.yaml"))


def _config(**sections: dict[str, Any]) -> Config:
    model = {**SMALL["model"], "num_layers": 4, "ffn_hidden_size": 128, "seq_length": 512}
    train = {"micro_batch_size": 1, "num_microbatches": [2]}
    return config_from_mapping({"device": "cuda", "model": model, "train": train, **sections})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_same_run_is_read_back(path: Path) -> None:
    config = load_config(path)
    result = resolved(config)
    assert config_from_mapping(yaml.safe_load(to_yaml(result))) == result == resolved(result)
    assert result.tokens_per_sequence == config.tokens_per_sequence
    for name in ("num_model_chunks", "microbatch_group_size", "world_size"):
        assert getattr(result.pipeline, name) == getattr(config.pipeline, name)


def test_what_others_decide_is_written_out() -> None:
    result = resolved(
        _config(
            packing={"max_packed_seqs": 200},
            pipeline={"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            moe={"num_moe_experts": 4, "moe_expert_capacity_factor": 2.0},
        )
    )
    assert result.model.layer_spec == "transformer_engine"
    assert (result.packing.max_packed_tokens, result.packing.seq_buckets) == (512, (32, 64))
    assert result.pipeline.microbatch_group_size_per_vp_stage == 2
    assert result.moe.moe_ffn_hidden_size == 128
    assert resolved(_config()).pipeline.virtual_pipeline_model_parallel_size == 1
    assert resolved(_config()).packing.max_packed_tokens is None
    assert resolved(_config()).moe.moe_ffn_hidden_size is None
