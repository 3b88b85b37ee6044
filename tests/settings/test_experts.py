from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.launch.megatron_flags import flag_values
from chunkgraph.settings import config_from_mapping
from chunkgraph.trainer.model import expert_settings

_EXPERTS = {"num_moe_experts": 8, "moe_expert_capacity_factor": 1.5}


def _config(moe: dict[str, Any], **pipeline: int) -> Any:
    return config_from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "ffn_hidden_size": 64,
                "num_attention_heads": 4,
                "seq_length": 16,
            },
            "pipeline": pipeline,
            "train": {"num_microbatches": [2]},
            "moe": moe,
        }
    )


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("captures", [True, False])
def test_experts_take_what_comes_without_a_capacity(pads: bool, captures: bool) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4}
    config = config_from_mapping(
        {
            "model": {**sizes, "seq_length": 16},
            "train": {"num_microbatches": [2]},
            "moe": {"num_moe_experts": 8, "moe_pad_expert_input_to_capacity": pads},
            "pipeline": {"data_parallel_size": 2, "expert_model_parallel_size": 2},
            "capture": {"enabled": captures},
            "device": "cpu",
        }
    )
    assert not expert_settings(config)["moe_pad_expert_input_to_capacity"]


def test_a_gpu_multiplies_only_bfloat16_without_a_capacity() -> None:
    config = _config({"num_moe_experts": 8})
    replace(config, device="cpu")
    replace(config, device="cuda", model=replace(config.model, params_dtype="bfloat16"))
    with pytest.raises(
        ConfigError, match=r"params_dtype is float32 with .*_factor=null: the group"
    ):
        replace(config, device="cuda")


def test_experts_are_off_until_their_number_is_set() -> None:
    assert _config({"moe_expert_capacity_factor": 0.1}).moe.num_moe_experts is None
    assert _config(_EXPERTS).moe.moe_router_topk == 2
    assert _config({**_EXPERTS, "moe_layer_freq": [0, 1]}).moe.moe_layer_freq == (0, 1)
    assert _config(
        {**_EXPERTS, "moe_expert_capacity_factor": 0.5, "token_drops": "count"},
        data_parallel_size=4,
        expert_model_parallel_size=2,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_pad_expert_input_to_capacity": False}, "experts would drop tokens and still"),
        ({"moe_expert_capacity_factor": 0.5}, "below 1, tokens are dropped"),
        ({"moe_expert_capacity_factor": 4.5}, r"is 4.5: above .* \(4\) .* has room for all"),
        ({"moe_router_topk": 9}, r"moe_router_topk is 9 with moe.num_moe_experts=8"),
        ({"moe_router_topk": 1}, "moe_router_pre_softmax=true"),
        ({"moe_layer_freq": [1]}, "num_layers=2: the former needs one number for each layer"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_score_function=sigmoid"),
        ({"moe_router_num_groups": 2}, "go together"),
        (
            {"moe_router_num_groups": 3, "moe_router_group_topk": 1},
            "must divide moe.num_moe_exp",
        ),
        (
            {"moe_token_dispatcher_type": "flex"},
            "backend=null: .*backend=hybridep, or ",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config({**_EXPERTS, **changes})


@pytest.mark.parametrize(
    ("moe", "pipeline", "message"),
    [
        ({}, {"expert_model_parallel_size": 2}, "there are no experts to split"),
        (_EXPERTS, {"expert_model_parallel_size": 3}, r"does not divide moe.num_moe_experts=8"),
        (_EXPERTS, {"expert_model_parallel_size": 2}, "must divide the latter"),
        (_EXPERTS, {"tensor_model_parallel_size": 2}, "only with sequence parallelism"),
    ],
)
def test_experts_that_cannot_be_shared_out(
    moe: dict[str, Any], pipeline: dict[str, int], message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        _config(moe, **pipeline)


_HYBRIDEP = {
    "num_moe_experts": 8,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_expert_rank_capacity_factor": 1.5,
    "use_transformer_engine_op_fuser": True,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "token_drops": "rerun",
}


_PACKED: dict[str, dict[str, Any]] = {
    "model": {"layer_spec": "transformer_engine"},
    "packing": {"max_packed_seqs": 4},
}


def _through_hybridep(moe: dict[str, Any], **sections: dict[str, Any]) -> Any:
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4}
    kind = {"swiglu": True, "params_dtype": "bfloat16", "seq_length": 16}
    model = {**sizes, **kind, **sections.pop("model", {})}
    mapping = {"model": model, "pipeline": {}, "train": {"num_microbatches": [2]}}
    return config_from_mapping({**mapping, "moe": {**_HYBRIDEP, **moe}, **sections})


_OF_NODE = {"pipeline": {"data_parallel_size": 2, "expert_model_parallel_size": 2}}


def test_a_budget_goes_to_megatron_with_a_capture_alone() -> None:
    config = _through_hybridep({}, **_OF_NODE)
    assert expert_settings(config)["moe_expert_rank_capacity_factor"] == 1.5
    # Without a capture nothing would report rows without room.
    eager = _through_hybridep({}, **_OF_NODE, capture={"enabled": False})
    assert "moe_expert_rank_capacity_factor" not in expert_settings(eager)
    for settings, has_budget in ((config, True), (eager, False)):
        flags = [value.flag for value in flag_values(settings, without_capture=False)]
        assert ("--moe-expert-rank-capacity-factor" in flags) is has_budget


@pytest.mark.parametrize(
    ("moe", "sections", "message"),
    [
        ({"moe_flex_dispatcher_backend": "deepep"}, {}, "hybridep"),
        ({"moe_expert_capacity_factor": 2.0}, {}, "moe_expert_capacity_factor is 2.0 with .*=hy"),
        ({"moe_router_dtype": None}, {}, "use moe.moe_router_dtype=fp32"),
        ({}, {"model": {"params_dtype": "float32"}}, "use model.params_dtype=bfloat16"),
        ({}, {"capture": {"num_warmup_steps": 0}}, "capture.num_warmup_steps is 0"),
        ({"moe_token_dispatcher_type": "alltoall"}, {}, "it belongs to .*=flex"),
    ],
)
def test_what_cannot_go_with_hybridep_is_named(
    moe: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    assert _through_hybridep({}).moe.moe_flex_dispatcher_backend == "hybridep"
    assert _through_hybridep({"moe_expert_rank_capacity_factor": None, "token_drops": "warn"})
    assert _through_hybridep({}, **_PACKED).packing.max_packed_seqs == 4
    with pytest.raises(ConfigError, match=message):
        _through_hybridep(moe, **sections)
