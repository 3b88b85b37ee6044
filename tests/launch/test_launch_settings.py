"""Every value of a configuration file reaches a pretrain script, or is refused or noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch_flags import graph_flags_of, merged

from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import parse_options
from chunkgraph.settings import (
    CaptureConfig,
    Config,
    ModelConfig,
    PackingConfig,
    PipelineConfig,
    load_config,
)
from chunkgraph.settings.models import TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"

# Another value for each key, with the settings that it needs.
CHANGES: dict[str, dict[str, list[str]]] = {
    "model": {
        "num_layers": ["num_layers=8"],
        "hidden_size": ["hidden_size=128"],
        "ffn_hidden_size": ["ffn_hidden_size=96"],
        "num_attention_heads": ["num_attention_heads=2"],
        "seq_length": ["seq_length=8"],
        "swiglu": ["swiglu=false"],
        "untie_embeddings_and_output_weights": ["untie_embeddings_and_output_weights=false"],
        "params_dtype": ["params_dtype=float32"],
        "recompute_granularity": ["recompute_granularity=selective"],
        "recompute_modules": [
            *("swiglu=true", "recompute_granularity=selective"),
            "recompute_modules=[core_attn,mlp]",
        ],
        "fp8": ["layer_spec=transformer_engine", "fp8=hybrid"],
        "fp8_recipe": [
            *("layer_spec=transformer_engine", "fp8=hybrid"),
            "fp8_recipe=tensorwise",
        ],
        "layer_spec": ["layer_spec=local"],
        "transformer_config": ['transformer_config={"hidden_dropout":0.25}'],
    },
    "pipeline": {
        "pipeline_model_parallel_size": ["pipeline_model_parallel_size=1"],
        "virtual_pipeline_model_parallel_size": ["virtual_pipeline_model_parallel_size=2"],
        "microbatch_group_size_per_vp_stage": [
            "virtual_pipeline_model_parallel_size=2",
            "microbatch_group_size_per_vp_stage=3",
        ],
        "schedule": ["schedule=zb-h1"],
        "tensor_model_parallel_size": ["tensor_model_parallel_size=2"],
        "sequence_parallel": ["tensor_model_parallel_size=2", "sequence_parallel=true"],
        "context_parallel_size": ["context_parallel_size=2"],
    },
    "train": {
        "overlap_grad_reduce": ["overlap_grad_reduce=true"],
        "use_distributed_optimizer": ["use_distributed_optimizer=true"],
        "overlap_param_gather": [
            *("overlap_grad_reduce=true", "use_distributed_optimizer=true"),
            "overlap_param_gather=true",
        ],
    },
    "capture": {
        "enabled": ["enabled=false"],
        "scope": ["scope=chunk"],
        "num_warmup_steps": ["num_warmup_steps=3"],
        "max_slot_memory": ["max_slot_memory=20GiB"],
        "verify": ["verify=poison"],
        "on_failure": ["on_failure=eager"],
    },
}
ELSEWHERE = {
    # The tokenizer sets it; refused.
    "model": {"vocab_size", "hybrid_layer_pattern"},
    "pipeline": {"data_parallel_size", "expert_model_parallel_size"},  # processes; `moe`'s test
    # Pretrain scripts have these of their own, and Megatron's choice of kernels.
    "train": {
        *("num_microbatches", "micro_batch_size", "seed", "lr", "compare"),
        *("gradient_accumulation_fusion", "deterministic"),
    },
    "capture": set[str](),
}
SECTIONS = {
    "model": ModelConfig,
    "pipeline": PipelineConfig,
    "train": TrainConfig,
    "capture": CaptureConfig,
}


def _load(*overrides: str) -> Config:
    # Counts that an interleaved schedule also accepts, in groups of 2 and 3.
    return load_config(
        CONFIGS / "gpu" / "gpt_pp2_gpu.yaml", ["train.num_microbatches=[6]", *overrides]
    )


def test_a_hybrid_model_is_refused() -> None:
    layers = ["model.num_layers=4", "model.hybrid_layer_pattern=M-M-"]
    with pytest.raises(ConfigError, match=r"is M-M-: a conf.*--hybrid-layer-pattern"):
        merged(_load(*layers))


@pytest.mark.parametrize("section", list(SECTIONS))
def test_no_key_of_the_file_is_ignored(section: str) -> None:
    keys = set(SECTIONS[section].model_fields)
    assert keys - ELSEWHERE[section] == set(CHANGES[section])
    for key, changes in CHANGES[section].items():
        *needed, last = [f"{section}.{c}" for change in changes for c in change.split()]
        assert last.startswith(f"{section}.{key}=")
        assert merged(_load(*needed)) != merged(_load(*needed, last)), last


def test_fields_of_megatron_have_flags() -> None:
    fields = "{normalization: LayerNorm, moe_layer_freq: [0, 1], moe_router_pre_softmax: true}"
    flags = merged(_load(f"model.transformer_config={fields}"))
    assert flags[flags.index("--normalization") + 1] == "LayerNorm"
    assert flags[flags.index("--moe-layer-freq") + 1] == "[0,1]"
    assert flags[flags.index("--moe-router-pre-softmax") + 1].startswith("--")
    assert flags[flags.index("--hidden-dropout") + 1] == "0.0"
    groups = "model.transformer_config.num_query_groups=2"
    flags = merged(_load(groups))
    assert flags[flags.index("--num-query-groups") + 1] == "2"
    assert "--group-query-attention" in flags, "Megatron ignores the number without it"
    assert "--group-query-attention" not in merged(_load(groups.replace("2", "null")))
    block = "model.transformer_config={recompute_method: block, recompute_num_layers: 2}"
    flags = merged(_load("model.recompute_granularity=full", block))
    assert flags[flags.index("--recompute-method") + 1] == "block"
    assert flags[flags.index("--recompute-num-layers") + 1] == "2"
    with pytest.raises(ConfigError, match=r"bias_dropout_fusion is false, .* pass Megatron's flag"):
        merged(_load("model.transformer_config.bias_dropout_fusion=false"))


def test_packed_sequences_of_the_file_are_flags() -> None:
    packing = ["packing.max_packed_seqs=4", "packing.buckets=[0.25,8]"]
    packing += ["device=cuda", "model.layer_spec=transformer_engine", "train.micro_batch_size=1"]
    flags = merged(_load(*packing, "packing.max_packed_tokens=12"))
    at = flags.index("--cuda-graph-max-packed-seqs")
    assert flags[at : at + 7] == [
        *("--cuda-graph-max-packed-seqs", "4", "--cuda-graph-max-packed-tokens", "12"),
        *("--cuda-graph-packed-buckets", "0.25", "8"),
    ]
    with pytest.raises(ConfigError, match=r"packing.seq_buckets .*it has no flag"):
        merged(_load(*packing, "packing.seq_buckets=[3,2]"))
    graph_flags = graph_flags_of(merged(_load(*packing), ["--cuda-graph-max-packed-seqs", "9"]))
    assert graph_flags is not None
    assert (graph_flags.packing.max_packed_seqs, graph_flags.packing.buckets) == (9, (0.25, 8.0))


def test_what_the_command_line_turns_off_is_off() -> None:
    """Also all of the file's flags that depend on it, which would be refused without it."""
    packing = ["packing.max_packed_seqs=4", "packing.buckets=[0.25]", "device=cuda"]
    packing += ["model.layer_spec=transformer_engine", "train.micro_batch_size=1"]
    flags = merged(_load(*packing), ["--cuda-graph-max-packed-seqs", "0"])
    graph_flags = graph_flags_of(flags)
    assert graph_flags is not None
    assert graph_flags.packing == PackingConfig()


def test_sizes_of_microbatches_are_flags() -> None:
    packing = ["packing.max_packed_seqs=4", "packing.context_parallel_sizes=[1,2,4]"]
    packing += ["device=cuda", "model.layer_spec=transformer_engine", "train.micro_batch_size=1"]
    packing += ["pipeline.data_parallel_size=4"]
    flags = merged(_load(*packing))
    assert "--calculate-per-token-loss" in flags
    graph_flags = graph_flags_of(flags)
    assert graph_flags is not None
    assert graph_flags.packing.context_parallel_sizes == (1, 2, 4)
    # Without packing the loss stays a mean.
    whole = merged(_load(*packing), ["--cuda-graph-max-packed-seqs", "0"])
    assert "--calculate-per-token-loss" not in whole
    for settings, arguments in (
        (["capture.enabled=false"], []),
        ([], ["--cuda-graph-granularity", "layer"]),
    ):
        with pytest.raises(ConfigError, match=r"sizes is \[1, 2, 4\]: documents of a"):
            merged(_load(*packing, *settings), arguments)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain.py"
    path.write_text("raise SystemExit(0)\n", encoding="utf-8")
    return path


def test_the_device_is_that_of_the_file(script: Path) -> None:
    def parse(*options: str) -> Any:
        return parse_options([*options, str(script)], "launch")

    cpu = str(CONFIGS / "cpu" / "gpt_pp2_cpu.yaml")
    assert parse().device == "cuda"
    assert parse("--config", cpu).device == "cpu"
    other = parse("--config", cpu, "--device", "cuda")
    assert other.device == "cuda"
