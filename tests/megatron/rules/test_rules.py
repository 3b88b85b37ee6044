"""Rules of a file with experts, a stash, changing context-parallel sizes or a hybrid pattern."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from extended_config import config_from_mapping
from small_settings import SMALL

from chunkgraph.errors import ChunkGraphError, ConfigError, TopologyError
from chunkgraph.settings import Config, derived_fields, load_config
from chunkgraph.settings.script_flags import flags_of

CONFIG = Path(__file__).parents[3] / "configs" / "gpu" / "gpt_pp2_gpu.yaml"
_SIZES = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4}
_EXPERTS = {"num_moe_experts": 8, "moe_expert_capacity_factor": 1.5}
_HYBRIDEP = {
    "num_moe_experts": 8,
    "moe_token_dispatcher_type": "flex",
    "moe_expert_rank_capacity_factor": 1.5,
    "token_drops": "rerun",
}


def _config(moe: dict[str, Any], model: dict[str, Any] | None = None, **sections: Any) -> Config:
    return config_from_mapping(
        {
            "model": {**_SIZES, "seq_length": 16, **(model or {})},
            "train": {"num_microbatches": [2]},
            "moe": moe,
            **sections,
        }
    )


def _through_hybridep(moe: dict[str, Any], **sections: Any) -> Config:
    model = {"swiglu": True, "params_dtype": "bfloat16", **sections.pop("model", {})}
    return _config({**_HYBRIDEP, **moe}, model, **sections)


def test_what_megatron_needs_follows_from_the_settings() -> None:
    one = derived_fields(_config({**_EXPERTS, "moe_router_topk": 1}))
    assert one["moe_router_pre_softmax"]
    assert one["moe_grouped_gemm"]
    assert "moe_flex_dispatcher_backend" not in one
    flex = derived_fields(_through_hybridep({}))
    assert flex["moe_flex_dispatcher_backend"] == "hybridep"
    assert flex["moe_router_dtype"] == "fp32"
    assert flex["use_transformer_engine_op_fuser"]
    measured = {"moe_expert_rank_capacity_factor": None, "token_drops": "warn"}
    flex = derived_fields(_through_hybridep(measured))
    assert "use_transformer_engine_op_fuser" not in flex
    assert not derived_fields(_config({**_EXPERTS, "moe_grouped_gemm": False}))["moe_grouped_gemm"]


def test_a_gpu_multiplies_only_bfloat16_without_a_capacity() -> None:
    config = _config({"num_moe_experts": 8}, device="cpu", model={"swiglu": True})
    assert config.replace(device="cuda", model={"params_dtype": "bfloat16"})
    with pytest.raises(
        ConfigError, match=r"params_dtype is float32 with .*_factor=null: the group"
    ):
        config.replace(device="cuda")


def test_settings_that_cannot_be_are_named() -> None:
    """In the words of a file; `test_moe_drops` and `test_stash` have the rules of experts."""
    with pytest.raises(ConfigError, match=r"moe_expert_capacity_factor is 4.5: above .* \(4\)"):
        _config({**_EXPERTS, "moe_expert_capacity_factor": 4.5})


def test_experts_that_cannot_be_shared_out() -> None:
    pipeline = {"expert_model_parallel_size": 3, "data_parallel_size": 3}
    with pytest.raises(TopologyError, match=r"does not divide moe.num_moe_experts=8"):
        _config(_EXPERTS, pipeline=pipeline)


def test_a_rank_budget_is_for_graphs() -> None:
    config = _through_hybridep({})
    # Without a capture nothing would report rows without room.
    eager = _through_hybridep({}, capture={"enabled": False})
    for settings, has_budget in ((config, True), (eager, False)):
        flags = [flag for flag, *_ in flags_of(settings)]
        assert ("--moe-expert-rank-capacity-factor" in flags) is has_budget
        assert ("--use-transformer-engine-op-fuser" in flags) is has_budget


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({"moe_router_dtype": None}, r"use model.transformer_config.moe_router_dtype=fp32"),
        ({"moe_token_dispatcher_type": "alltoall"}, "it belongs to .*=flex"),
    ],
)
def test_what_cannot_go_with_hybridep_is_named(moe: dict[str, Any], message: str) -> None:
    """In the words of a file; `test_hybridep` has all rules."""
    packed = {"model": {"layer_spec": "transformer_engine"}, "packing": {"max_packed_seqs": 4}}
    assert _through_hybridep({}, **packed).packing.max_packed_seqs == 4
    with pytest.raises(ConfigError, match=message):
        _through_hybridep(moe)


def test_the_stash_is_a_flag_of_a_pretrain_script() -> None:
    config = _config({**_EXPERTS, "token_drops": "rerun"}, stash={"enabled": True})
    flags = flags_of(config)
    assert ("--cuda-graph-token-drops", "rerun") in flags
    assert ("--cuda-graph-stash", "true") in flags
    limited = config.replace(stash={"max_bytes": 1 << 20})
    with pytest.raises(ConfigError, match=r"stash.max_bytes is 1048576: it has no flag"):
        flags_of(limited)
    assert not any("stash" in flag for flag, *_ in flags_of(_config(_EXPERTS)))


_SIZES_THAT_CHANGE = (
    "train.micro_batch_size=1",
    "pipeline.data_parallel_size=4",
    "packing.max_packed_seqs=8",
    "packing.max_packed_tokens=256",
    "packing.context_parallel_sizes=[1,2,4]",
)


def test_sizes_of_microbatches_need_packing() -> None:
    good = load_config(CONFIG, _SIZES_THAT_CHANGE)
    assert good.packing.context_parallel_sizes == (1, 2, 4)
    assert load_config(CONFIG).packing.context_parallel_sizes == ()
    with pytest.raises(ConfigError, match=r"sizes is \[1, 2, 4\].*: packing is off"):
        load_config(CONFIG, [*_SIZES_THAT_CHANGE, "packing.max_packed_seqs=0"])


# The pattern of a hybrid model, and its refusals.


def _hybrid(
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
                **SMALL["model"],
                "num_layers": 6,
                "hybrid_layer_pattern": pattern,
                **(model or {}),
            },
            "pipeline": pipeline,
            "train": {"num_microbatches": [4]},
            **sections,
        }
    )


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
        _hybrid(pattern, **options)


def test_the_pattern_chooses_where_experts_are() -> None:
    moe = {"num_moe_experts": 4, "moe_expert_capacity_factor": 2.0}
    assert _hybrid("M-MEM-", moe=moe).moe.num_moe_experts == 4
    with pytest.raises(ConfigError, match=r"the pattern decides .* leave the former out"):
        _hybrid("M-MEM-", moe={**moe, "moe_layer_freq": [1] * 6})
