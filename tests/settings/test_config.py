"""Values of a configuration: types, bounds, and rules between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from small_settings import SMALL

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.settings import (
    Config,
    config_from_mapping,
    load_config,
    resolved,
    settings_of,
    to_yaml,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def test_the_settings_are_few_and_documented() -> None:
    items = list(settings_of(Config))
    assert len(items) <= 60
    assert len([item for item in items if item.flag]) <= 11
    assert all(item.help.endswith(".") for item in items)
    assert len({item.name for item in items} - {"enabled"}) == len(items) - 2


def test_overrides_replace_values_and_are_read_as_yaml(small: Path) -> None:
    overrides = ["train.num_microbatches=[2,8]", "train.lr=1e-4", "data.path=a=b.txt"]
    config = load_config(small, [*overrides, "model.swiglu=true", "train.lr=2e-4"])
    assert config.train.num_microbatches == (2, 8)
    assert config.train.lr == 2e-4
    assert config.data.path == "a=b.txt"
    assert config.model.swiglu is True
    assert load_config(small, ["train={seed: 7}"]).train.seed == 7


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "model.num_layer=4",
            ["model.num_layer", "Did you mean 'num_layers'?", "Known keys: ffn_hidden_size,"],
        ),
        ("modl.num_layers=4", ["modl", "the top level", "Did you mean 'model'?"]),
        ("lr=1", ["unknown key 'lr'", "Did you mean 'train.lr'?"]),
        ("train.verify=none", ["Did you mean 'capture.verify'?"]),
        ("device.first=x", ["device is {'first': 'x'}", "'cpu', 'cuda' or 'auto'"]),
        ("model.num_layers=eight", ["model.num_layers is 'eight'; it must be a whole number"]),
        ("model.swiglu=1", ["model.swiglu is 1; it must be true or false"]),
        ("train.lr=.inf", ["train.lr is inf; it must be a finite number"]),
        (
            "capture.max_slot_memory=abc",
            ["capture.max_slot_memory is 'abc'; it must be a size like 80GiB or 80GB"],
        ),
        ("train.lr=0", ["train.lr is 0; it must be greater than 0"]),
        ("train.seed=9223372036854775808", ["train.seed is 922", "less than 9223372036854775808"]),
        ("capture.verify=Shadow", ["capture.verify is 'Shadow'", "Did you mean 'shadow'?"]),
        ("train.num_microbatches=4", ["train.num_microbatches is 4; it must be a list"]),
        ("train.num_microbatches=[]", ["num_microbatches is []: set one number for each step"]),
        ("train.num_microbatches=[0]", ["num_microbatches[0] is 0; it must be greater than 0"]),
        ("model.transformer_config=3", ["model.transformer_config is 3; it must be a section"]),
        ("moe.moe_z_loss_coeff=1", ["moe.moe_z_loss_coeff", "belongs in model.transformer_config"]),
        ("model.transformer_config.num_layers=2", ["set model.num_layers instead"]),
        ("model=3", ["model is 3; it must be a section with keys ffn_hidden_size,"]),
        ("train.lr", ["override 'train.lr'", "section.key=value"]),
    ],
)
def test_a_wrong_value_is_named_with_the_reason(
    small: Path, override: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(small, [override])
    message = str(error.value)
    for part in parts:
        assert part in message
    assert len(message) < 1400
    assert "\n" not in message


def test_all_wrong_values_are_named_at_once(small: Path) -> None:
    overrides = ["train.lr=0", "model.swigl=1", "capture.verify=all", "train.seed=x", "device=gpu"]
    with pytest.raises(ConfigError) as error:
        load_config(small, overrides)
    first, *lines = str(error.value).split("\n  - ")
    assert first == f"{small}:"
    names = [line.split()[0].rstrip(":") for line in lines]
    assert names == ["device", "model.swigl", "train.seed", "train.lr", "capture.verify"]
    assert lines[0] == "device is 'gpu'; it must be 'cpu', 'cuda' or 'auto'."


@pytest.mark.parametrize(
    ("override", "error", "parts"),
    [
        ("model.num_layers=6", TopologyError, ["num_layers is 6", "4 stages", "4 or 8"]),
        ("model.hidden_size=66", ConfigError, ["hidden_size is 66", "num_attention_heads=4"]),
        ("model.vocab_size=200", ConfigError, ["vocab_size is 200", "257"]),
        (
            "model.recompute_granularity=selective; model.recompute_modules=[mlp]",
            ConfigError,
            ["recompute_modules is [mlp]", "model.swiglu=true"],
        ),
        ("device=cpu; model.fp8=hybrid", ConfigError, ["model.fp8 is hybrid", "device=cuda"]),
        (
            "device=cpu; moe.num_moe_experts=4; pipeline.tensor_model_parallel_size=2",
            ConfigError,
            ["only with sequence paral"],
        ),
        (
            "device=cpu; moe.num_moe_experts=4",
            ConfigError,
            ["local experts train without biases only"],
        ),
        (
            (
                "device=cpu; model.recompute_granularity=selective"
                "; model.recompute_modules=[layernorm]"
            ),
            ConfigError,
            ["recomputes these on GPUs only"],
        ),
        (
            "pipeline.sequence_parallel=true",
            TopologyError,
            ["tensor_model_parallel_size=1", "make the latter 2 or more"],
        ),
        ("model.layer_spec=te", ConfigError, ["'te'", "package.module:function"]),
        ("train.num_microbatches=[4,3]", TopologyError, ["s[1] is 3", "3 is not legal", "2 or 4"]),
        ("train.num_microbatches=[1]", TopologyError, ["needs one group of 2 or more"]),
        ("pipeline.pipeline_model_parallel_size=1", TopologyError, ["at least 2 pipeline ranks"]),
        ("packing.buckets=[0.5]", ConfigError, ["buckets is [0.5]", "packing is off"]),
        (
            "packing.max_packed_seqs=8; train.micro_batch_size=2",
            ConfigError,
            ["train.micro_batch_size is 2"],
        ),
    ],
)
def test_values_that_do_not_go_together(
    small: Path, override: str, error: type[Exception], parts: list[str]
) -> None:
    with pytest.raises(error) as exception:
        load_config(small, override.split("; "))
    message = str(exception.value)
    for part in parts:
        assert part in message


def test_group_tails_are_legal_from_the_pipeline_size_on(small: Path) -> None:
    overrides = ["pipeline.microbatch_group_size_per_vp_stage=3"]
    assert load_config(small, [*overrides, "train.num_microbatches=[3,5,6]"])
    with pytest.raises(TopologyError, match="3 or more, and a last group of none or at least 2"):
        load_config(small, [*overrides, "train.num_microbatches=[4]"])


def test_a_changed_copy_is_checked(small: Path) -> None:
    config = load_config(small)
    assert config.replace(device="cpu", train={"seed": 7}).train.seed == 7
    with pytest.raises(TopologyError, match="not divisible by 4 stages"):
        config.replace(model={"num_layers": 5})
    with pytest.raises(ConfigError, match="unknown key 'layers'"):
        config.replace(model={"layers": 5})


# A run's saved settings have the value of every default that depends on other settings.

CONFIGS = sorted((ROOT / "configs").glob("*/*.yaml"))


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
