"""Zero-bubble schedules on graphs equal Megatron's eager 1F1B, with every kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_cases
import pytest
from expert_cases import EXPERTS
from small_settings import RECOMPUTED

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

ZB = {"pipeline_model_parallel_size": 2, "schedule": "zb-h1"}
ZB_VPP = {**ZB, "virtual_pipeline_model_parallel_size": 2, "schedule": "interleaved-zb"}
COUNTS = [1, 3, 1, 2]
"""Two slots on each of two ranks: below, at and above them."""
GATED = {"num_layers": 2, "swiglu": True, "normalization": "RMSNorm", "hidden_dropout": 0.1}
FIXED = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
OVERLAP = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}

Run = Callable[..., dict[str, dict[str, Any]]]
Make = Callable[..., Any]


@pytest.fixture
def make(make_config: Callable[..., Any]) -> Make:
    """Return a function that makes a case of `run_cases`."""

    def case(
        pipeline: dict[str, Any], counts: list[int] | None = None, **sections: Any
    ) -> dict[str, Any]:
        train = {"num_microbatches": counts or COUNTS, **sections.pop("train", {})}
        return {"config": make_config(pipeline=pipeline, train=train, **sections)}

    return case


@pytest.mark.slow
def test_packed_sequences(
    run_equal: Run,
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
) -> None:
    text = write_documents((3, 5, 8, 13, 20))

    def case(kind: str, pipeline: dict[str, Any], counts: list[int], **options: Any) -> Any:
        result = packed_cases.cpu_case(text, make_config, kind, counts, **options, **pipeline)
        result["config"]["model"]["num_layers"] = 4
        return result

    buckets = {"buckets": [0.5], "seq_buckets": [4]}
    run_equal(
        {
            "packed": case("attention", ZB, COUNTS, packing=buckets, capture={"scope": "chunk"}),
            "experts": case("roomy_experts", ZB, COUNTS, packing=buckets),
            "interleaved": case("attention", ZB_VPP, [2, 4, 2], capture={"verify": "poison"}),
        },
        2,
        timeout_s=240,
    )


@pytest.mark.slow
def test_experts(run_equal: Run, make: Make) -> None:
    results = run_equal(
        {
            "dropless": make(ZB, model=GATED, moe=EXPERTS, capture={"scope": "chunk"}),
            "fixed": make(ZB, model=GATED, moe={**EXPERTS, **FIXED}),
            "interleaved": make(ZB_VPP, [2, 4, 2], model={**GATED, "num_layers": 4}, moe=EXPERTS),
            "predicting": {
                **make(ZB, model=GATED, moe=EXPERTS),
                "transformer_options": {"mtp_num_layers": 1},
            },
        },
        2,
        timeout_s=240,
    )
    for name, result in results.items():
        assert all(step["replays"] > 0 for step in result["steps"][1:]), name
        assert result["dropped_tokens"] == 0, name


@pytest.mark.slow
def test_experts_that_stash(run_cases: Run, make: Make) -> None:
    """Weight halves run after later forwards have reused their tensors' pages."""

    def case(pipeline: dict[str, Any], counts: list[int], num_layers: int = 2, **stash: int) -> Any:
        return make(
            pipeline,
            counts,
            model={**GATED, "num_layers": num_layers},
            moe={**EXPERTS, **FIXED},
            stash={"enabled": True, **stash},
            train={"micro_batch_size": 3},
        )

    results = run_cases(
        {
            "enough": case(ZB, COUNTS),
            "short": case(ZB, [*COUNTS, 4], initial_bytes=0),
            "interleaved": case(ZB_VPP, [2, 4, 2], num_layers=4),
        },
        2,
        timeout_s=240,
    )
    for name, result in results.items():
        for step in result["steps"]:
            assert step["different"] == [], (name, step)
        assert result["different_parameters"] == {}, name
        assert min(result["stash_bytes"]) > 0, name
    assert [bool(result["recaptures"]) for result in results.values()] == [False, True, False]


@pytest.mark.slow
def test_recomputation(run_equal: Run, make: Make) -> None:
    some = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    run_equal(
        {
            "full": make(ZB, model=RECOMPUTED, capture={"scope": "chunk"}),
            "selective": make(ZB, model={**some, "swiglu": True, "hidden_dropout": 0.1}),
            "delayed": make(ZB, model={**RECOMPUTED, "layer_spec": "delayed_layers:delaying"}),
        },
        2,
        timeout_s=240,
    )


@pytest.mark.slow
def test_four_stages(run_equal: Run, make: Make) -> None:
    pp4 = {**ZB, "pipeline_model_parallel_size": 4}
    results = run_equal(
        {
            "pp4": make(pp4, [4, 2, 4, 7], model={"num_layers": 4, "hidden_dropout": 0.1}),
            "overlap": make(
                pp4, [3, 5, 4], model={"num_layers": 4}, train=OVERLAP, capture={"scope": "chunk"}
            ),
        },
        4,
        timeout_s=240,
    )
    # Every rank has four slots.
    assert results["pp4"]["slots_per_chunk"] == [[4]] * 4


@pytest.mark.slow
def test_tensor_and_data_parallel_ranks(run_equal: Run, make: Make) -> None:
    vpp = {**ZB_VPP, "data_parallel_size": 2}
    gathered = {**OVERLAP, "overlap_param_gather": True}
    run_equal(
        {
            "tp2": make({**ZB, "tensor_model_parallel_size": 2}, model={"hidden_dropout": 0.1}),
            "tp2_sequence": make(
                {**ZB, "tensor_model_parallel_size": 2, "sequence_parallel": True},
                model={"layer_spec": "user_specs:split_sequences_2", "hidden_dropout": 0.1},
            ),
            "tp2_experts": make(
                {**ZB, "tensor_model_parallel_size": 2, "sequence_parallel": True},
                model={
                    "num_layers": 2,
                    "layer_spec": "user_specs:experts_split",
                    "add_bias_linear": False,
                },
                moe=EXPERTS,
            ),
            "dp2": make({**ZB, "data_parallel_size": 2}, train=OVERLAP),
            "dp2_delayed": make(
                {**ZB, "data_parallel_size": 2},
                train=OVERLAP,
                model={"layer_spec": "delayed_layers:delaying"},
            ),
            "dp2_vpp2": make(vpp, [2, 4, 2], model={"num_layers": 4}, train=gathered),
            "ep2": make(
                {**ZB, "data_parallel_size": 2, "expert_model_parallel_size": 2},
                model=GATED,
                moe={**EXPERTS, **FIXED},
            ),
        },
        4,
        timeout_s=240,
    )


@pytest.mark.slow
def test_gradients_are_reduced_after_the_last_input_gradients(
    run_equal: Run, make: Make, tmp_path: Path
) -> None:
    """The last I and the last W of this schedule belong to different microbatches."""
    rows = [
        "0F0,0F1,0I0,0I1,0F2,0F3,0I2,0I3,0W3,0W2,0W1,0W0",
        "1F0,1F1,1I0,1I1,1F2,1F3,1I2,1B3,1W2,1W1,1W0",
    ]
    path = tmp_path / "late.csv"
    path.write_text("\n".join(rows) + "\n")
    pipeline = {**ZB, "schedule": str(path), "data_parallel_size": 2}
    run_equal(
        {
            name: make(pipeline, [4, 4, 4], train=OVERLAP, capture={"num_warmup_steps": 2}, **more)
            for name, more in {
                "at_once": {},
                "delayed": {"model": {"layer_spec": "delayed_layers:delaying"}},
            }.items()
        },
        4,
        timeout_s=240,
    )
