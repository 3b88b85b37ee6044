"""Megatron's schedules with fewer slots than microbatches in flight equal eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_cases
import pytest
from expert_cases import EXPERTS
from extended_config import config_from_mapping
from in_process import Trained
from small_settings import RECOMPUTED

from chunkgraph import CaptureOptions
from chunkgraph.errors import ConfigError
from chunkgraph.settings import StashConfig

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

VPP = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
DROPOUT = {"num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}
GATED = {"num_layers": 4, "swiglu": True, "hidden_dropout": 0.1}
TWO = {"max_slots": 2}


@pytest.fixture
def make(make_config: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a case of `run_cases`."""

    def case(pipeline: dict[str, Any], counts: list[int], **sections: Any) -> dict[str, Any]:
        train = {"num_microbatches": counts, **sections.pop("train", {})}
        return {"config": make_config(pipeline=pipeline, train=train, **sections)}

    return case


def test_two_ranks(run_equal: Callable[..., Any], make: Callable[..., Any]) -> None:
    results = run_equal(
        {
            "interleaved": make(VPP, [4, 2, 6, 4], model=DROPOUT, capture=TWO),
            "whole chunks": make(VPP, [4, 2, 6], model=DROPOUT, capture={**TWO, "scope": "chunk"}),
        },
        2,
        timeout_s=240,
    )
    for result in results.values():
        assert result["slots_per_chunk"] == [[2, 2], [2, 1]]


@pytest.mark.slow
def test_all_kinds_of_models(run_equal: Callable[..., Any], make: Callable[..., Any]) -> None:
    zero_bubble = {**VPP, "schedule": "interleaved-zb"}
    overlap = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    run_equal(
        {
            "experts": make(
                VPP, [4, 2, 6], model=GATED, moe=EXPERTS, capture={**TWO, "scope": "chunk"}
            ),
            "recomputed": make(VPP, [4, 2, 6], model={**RECOMPUTED, "num_layers": 4}, capture=TWO),
            "zero bubble": make(zero_bubble, [4, 2, 6], model=DROPOUT, capture={"max_slots": 3}),
            "overlap": make(VPP, [4, 2, 6], model=DROPOUT, train=overlap, capture=TWO),
        },
        2,
        timeout_s=240,
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8(run_equal: Callable[..., Any], make: Callable[..., Any], recipe: str) -> None:
    model = {"layer_spec": "fp8_stand_in:quantized", "hidden_dropout": 0.1, "num_layers": 4}
    options = {"transformer_options": {"fp8": "hybrid", "fp8_recipe": recipe}}
    cases = {
        scope: {**make(VPP, [2, 6, 4], model=model, capture={**TWO, "scope": scope}), **options}
        for scope in ("block", "chunk")
    }
    for result in run_equal(cases, 2, timeout_s=240).values():
        assert result["slots_per_chunk"] == [[2, 2], [2, 1]]


@pytest.mark.slow
def test_four_ranks(run_equal: Callable[..., Any], make: Callable[..., Any]) -> None:
    pipeline = {"pipeline_model_parallel_size": 4}
    run_equal(
        {
            "1f1b": make(pipeline, [4, 8, 2, 6], model=DROPOUT, capture=TWO),
            "zero bubble": make(
                {**pipeline, "schedule": "zb-h1"}, [4, 8], model=DROPOUT, capture={"max_slots": 4}
            ),
        },
        4,
        timeout_s=240,
    )


@pytest.mark.slow
def test_packed_sequences_page_the_rows_of_their_bank(
    run_equal: Callable[..., Any],
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
) -> None:
    text = write_documents((3, 5, 8, 13, 20))
    buckets = {"buckets": [0.5], "seq_buckets": [4]}
    case = packed_cases.cpu_case(
        text, make_config, "attention", [2, 4, 6], packing=buckets, capture=TWO, **VPP
    )
    case["config"]["model"]["num_layers"] = 4
    run_equal({"packed": case}, 2, timeout_s=240)


def test_a_stash_is_refused(one_rank: Any, make: Callable[..., Any]) -> None:
    raw = make({}, [2], model=GATED, moe={**EXPERTS, "moe_expert_capacity_factor": 2.0})["config"]
    options = {"stash": StashConfig(enabled=True), "options": CaptureOptions(max_slots=2)}
    with pytest.raises(ConfigError, match=r"stash.*max_slot_memory.*one of them"):
        Trained(one_rank, config_from_mapping(raw), options)
