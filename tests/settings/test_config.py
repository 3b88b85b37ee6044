from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_settings import SMALL

from chunkgraph._text import shown
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.settings import (
    Config,
    load_config,
    settings_of,
    to_mapping,
)
from chunkgraph.settings.reference import reference_yaml

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*/*.yaml"))
REFERENCE = ROOT / "configs" / "reference.yaml"

FULL_RECOMPUTE = "model.recompute_granularity=full; model.recompute_method=uniform"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_config_loads_and_is_named_as_its_file(path: Path) -> None:
    assert load_config(path).name == path.stem


def _defaults() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in settings_of(Config):
        section, _, key = item.path.rpartition(".")
        default = list(item.default) if isinstance(item.default, tuple) else item.default
        (values.setdefault(section, {}) if section else values)[key] = default
    return values


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_has_a_title_and_holds_only_what_differs(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    raw = yaml.safe_load(text)
    base = raw.pop("extends", None)
    inherited = to_mapping(load_config(path.parent / base)) if base else _defaults()
    for section, values in raw.items():
        for key, value in values.items() if isinstance(values, dict) else [(section, values)]:
            before = inherited[section][key] if isinstance(values, dict) else inherited[key]
            assert value != before, f"{section}.{key} has this value without being written"


def test_the_reference_has_every_setting_and_is_generated() -> None:
    assert REFERENCE.read_text() == reference_yaml()
    raw = yaml.safe_load(REFERENCE.read_text())
    assert raw == to_mapping(load_config(REFERENCE))
    for item in settings_of(Config):
        section, _, key = item.path.rpartition(".")
        value = (raw[section] if section else raw)[key]
        expected = item.example if item.is_required else item.default
        assert value == (list(expected) if isinstance(expected, tuple) else expected)


def test_overrides_replace_values_and_are_read_as_yaml(small: Path) -> None:
    overrides = ["train.num_microbatches=[2,8]", "train.lr=1e-4", "data.path=a=b.txt", "name=n"]
    config = load_config(small, [*overrides, "run.debug=true", "train.lr=2e-4"])
    assert config.train.num_microbatches == (2, 8)
    assert config.train.lr == 2e-4
    assert config.data.path == "a=b.txt"
    assert config.name == "n"
    assert config.run.debug is True


def test_defaults_and_derived_sizes(small: Path) -> None:
    config = load_config(small, ["pipeline.data_parallel_size=3"])
    assert config.pipeline.num_model_chunks == 2
    assert config.pipeline.microbatch_group_size == 2
    assert config.pipeline.world_size == 6
    assert load_config(SHIPPED[0]).pipeline.num_model_chunks >= 1


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "model.num_layer=4",
            ["model.num_layer", "Did you mean 'num_layers'?", "Known keys: attention_dropout,"],
        ),
        ("modl.num_layers=4", ["modl", "the top level", "Did you mean 'model'?"]),
        ("name.first=x", ["name is a single value"]),
        ("model.num_layers=eight", ["model.num_layers", "a whole number", "'eight' (text)"]),
        ("model.num_layers=true", ["model.num_layers", "True (truth value)"]),
        ("model.swiglu=1", ["model.swiglu", "true or false", "1 (whole number)"]),
        ("train.lr=.inf", ["train.lr is inf", "a finite number"]),
        ("train.seed=9223372036854775808", ["train.seed is 922", "end at 9223372036854775807"]),
        (f"train.seed={'9' * 400}", ["train.seed is (a whole number of about 400 digits)"]),
        ('data.path="a\\0b"', ["data.path is 'a\\x00b'; text must not have NUL"]),
        ("capture.verify=Shadow", ["capture.verify", "Did you mean 'shadow'?"]),
        ("train.num_microbatches=4", ["train.num_microbatches", "a list of whole numbers"]),
        ("train.num_microbatches=[4, x]", ["train.num_microbatches[1]", "'x' (text)"]),
        ("model=3", ["model: expected a section"]),
        ("model.num_layers=null", ["model.num_layers", "nothing (null)"]),
        ("train.lr", ["section.key=value"]),
    ],
)
def test_a_bad_override_is_named_with_the_reason(
    small: Path, override: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(small, [override])
    message = str(error.value)
    for part in [f"override {shown(override)}", *parts]:
        assert part in message


@pytest.mark.parametrize(
    ("override", "error", "parts"),
    [
        ("model.num_layers=6", TopologyError, ["num_layers is 6", "4 stages", "4 or 8"]),
        ("model.hidden_size=66", ConfigError, ["hidden_size is 66", "num_attention_heads=4"]),
        ("model.hidden_size=68", ConfigError, ["rope", "17"]),
        ("model.vocab_size=200", ConfigError, ["vocab_size is 200", "257"]),
        ("model.hidden_dropout=1.0", ConfigError, ["hidden_dropout is 1.0", "less than 1"]),
        (
            "model.recompute_granularity=full",
            ConfigError,
            ["model.recompute_method is null", "recompute_granularity=full"],
        ),
        (
            "model.recompute_granularity=selective; model.recompute_modules=[mlp]",
            ConfigError,
            ["recompute_modules is [mlp]", "model.swiglu=true"],
        ),
        (
            "model.recompute_granularity=selective; model.recompute_modules=[]",
            ConfigError,
            ["with model.recompute_modules=[]", "would recompute nothing"],
        ),
        (
            f"{FULL_RECOMPUTE}; model.recompute_num_layers=3",
            ConfigError,
            ["recompute_num_layers is 3", "the 2 layers of a chunk"],
        ),
        ("device=cpu; model.fp8=hybrid", ConfigError, ["model.fp8 is hybrid", "device=cuda"]),
        (
            "device=cuda; model.fp8=e4m3; model.ffn_hidden_size=120",
            ConfigError,
            ["model.ffn_hidden_size is 120", "multiple of 16"],
        ),
        (
            f"device=cuda; model.fp8=hybrid; {FULL_RECOMPUTE}; model.recompute_num_layers=1",
            ConfigError,
            ["recompute_granularity is full with model.fp8=hybrid", "recompute only core_attn"],
        ),
        (
            "pipeline.sequence_parallel=true",
            TopologyError,
            ["tensor_model_parallel_size=1", "make the latter 2 or more"],
        ),
        (
            "device=cpu; pipeline.sequence_parallel=true; pipeline.tensor_model_parallel_size=2",
            ConfigError,
            ["pipeline.sequence_parallel is true", "local layers refuse"],
        ),
        (
            "model.layer_spec=local; pipeline.context_parallel_size=2",
            ConfigError,
            ["pipeline.context_parallel_size is 2", "model.layer_spec=transformer_engine"],
        ),
        (
            "device=cuda; pipeline.context_parallel_size=2; model.seq_length=18",
            TopologyError,
            ["model.seq_length is 18", "4, the number of parts", "16 or 20"],
        ),
        ("model.layer_spec=te", ConfigError, ["'te'", "package.module:function"]),
        ("train.num_microbatches=[4,3]", TopologyError, ["num_microbatches[1] is 3", "2 or 4"]),
        ("train.num_microbatches=[]", ConfigError, ["is empty"]),
        (
            "train.overlap_grad_reduce=true",
            ConfigError,
            ["is true with train.use_ddp=false"],
        ),
        ("pipeline.pipeline_model_parallel_size=1", TopologyError, ["no pipeline to interleave"]),
        (
            "pipeline.tensor_model_parallel_size=3",
            TopologyError,
            ["num_attention_heads is 4", "not divisible by the latter"],
        ),
        (
            "pipeline.microbatch_group_size_per_vp_stage=1",
            TopologyError,
            ["stage is 1", "would deadlock"],
        ),
        (
            "packing.max_packed_seqs=1",
            ConfigError,
            ["max_packed_seqs is 1", "or 0 for no packed sequences"],
        ),
        (
            "packing.max_packed_seqs=8; packing.max_packed_tokens=3000000000",
            ConfigError,
            ["max_packed_tokens=3000000000", "2147483647"],
        ),
        (
            (
                "packing.max_packed_seqs=8; train.micro_batch_size=1; model.layer_spec=a.b:c; "
                "pipeline.tensor_model_parallel_size=2; pipeline.sequence_parallel=true; "
                "packing.max_packed_tokens=25; device=cuda"
            ),
            TopologyError,
            ["25 rows", "not divisible by 2", "tensor_model_parallel_size=2", "24 or 26"],
        ),
        (
            (
                "packing.max_packed_seqs=8; train.micro_batch_size=1; model.layer_spec=a.b:c; "
                "pipeline.context_parallel_size=2; data.document_counts=[1,2,3,9]"
            ),
            ConfigError,
            ["9 documents do not fit in the 32 rows", "each takes at least 4"],
        ),
        ("packing.buckets=[0.5]", ConfigError, ["buckets is [0.5]", "packing is off"]),
        (
            "packing.max_packed_seqs=8; train.micro_batch_size=1; packing.buckets=[0.5,9999]",
            ConfigError,
            ["packing.buckets is [0.5, 9999.0]", "9999 is neither", "whole number of rows"],
        ),
        (
            "packing.max_packed_seqs=8; train.micro_batch_size=1; data.document_counts=[3,2,1,4]",
            ConfigError,
            [
                "data.document_counts: [3, 2, 1, 4]",
                "four numbers of at least 1 that do",
            ],
        ),
        (
            "packing.max_packed_seqs=8; train.micro_batch_size=1; packing.max_document_tokens=9999",
            ConfigError,
            ["packing.max_document_tokens is 9999", "a microbatch has 32 tokens"],
        ),
        (
            (
                "packing.max_packed_seqs=8; packing.max_document_tokens=9; "
                "train.micro_batch_size=1; packing.context_parallel_sizes=[1]"
            ),
            ConfigError,
            ["max_document_tokens is 9 with packing.context_parallel_sizes", "leave the former"],
        ),
        (
            (
                "packing.max_packed_seqs=8; train.micro_batch_size=1; packing.pad_seq_to_mult=8; "
                "packing.context_parallel_sizes=[1]; packing.max_packed_tokens=60"
            ),
            ConfigError,
            ["with packing.pad_seq_to_mult=8", "use packing.pad_seq_to_mult=1"],
        ),
        (
            (
                "packing.max_packed_seqs=8; train.micro_batch_size=1; model.layer_spec=a.b:c; "
                "pipeline.context_parallel_size=2; packing.pad_seq_to_mult=6; device=cuda"
            ),
            TopologyError,
            [
                "32 rows",
                "by 12",
                "with pipeline.context_parallel_size=2 and packing.pad_seq_to_mult=6",
                "24 or 36",
            ],
        ),
        (
            "packing.max_packed_seqs=8; train.micro_batch_size=2",
            ConfigError,
            ["train.micro_batch_size is 2"],
        ),
        (
            "packing.max_packed_seqs=8; train.micro_batch_size=1; model.layer_spec=local",
            ConfigError,
            ["model.layer_spec is local", "does not support packed sequences"],
        ),
        (
            (
                "packing.max_packed_seqs=8; packing.max_packed_tokens=99999; "
                "train.micro_batch_size=1; model.layer_spec=a:b; "
                "model.position_embedding_type=learned_absolute"
            ),
            ConfigError,
            ["packing.max_packed_tokens is 99999", "learned positions end"],
        ),
    ],
)
def test_values_that_do_not_go_together(
    small: Path, override: str, error: type[Exception], parts: list[str]
) -> None:
    with pytest.raises(error) as exception:
        load_config(small, ["train.use_ddp=false", *override.split("; ")])
    message = str(exception.value)
    for part in [str(small), *parts]:
        assert part in message


def test_group_tails_are_legal_from_the_pipeline_size_on(small: Path) -> None:
    overrides = ["pipeline.microbatch_group_size_per_vp_stage=3"]
    assert load_config(small, [*overrides, "train.num_microbatches=[3,5,6]"])
    with pytest.raises(TopologyError, match="last group of 1"):
        load_config(small, [*overrides, "train.num_microbatches=[4]"])


def test_checks_hold_for_configs_made_in_python(small: Path) -> None:
    config = load_config(small)
    model = dataclasses.replace(config.model, num_layers=5)
    with pytest.raises(TopologyError):
        dataclasses.replace(config, model=model)
