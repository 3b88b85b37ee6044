"""Whole jobs: chunk graphs equal eager training to the last bit, in every topology."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
# Other cases have several layers in a chunk.
_SHALLOW = {**_DROPOUT, "num_layers": 2}


def _pipeline(pp: int = 1, vpp: int | None = None, **others: int) -> dict[str, Any]:
    return {
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        **others,
    }


def _check(
    results: dict[str, dict[str, Any]],
    cases: dict[str, dict[str, Any]],
    slots: dict[str, list[list[int]]],
) -> None:
    """Check that all is equal, with one capture and a replay of every later microbatch."""
    both = {f"{name}_{scope}": n for name, n in slots.items() for scope in ("block", "chunk")}
    slots = {**slots, **both}
    for name, result in results.items():
        config = cases[name]["config"]
        counts = config["train"]["num_microbatches"]
        num_warmup = config.get("capture", {}).get("num_warmup_steps", 1)
        num_chunks = len(slots[name][0])
        steps = result["steps"]
        assert [s["num_microbatches"] for s in steps] == counts, name
        assert len({s["loss"] for s in steps}) == len(counts), f"{name}: nothing trained"
        assert all(s["grad_norm"] > 0 for s in steps), name
        assert result["num_parameters_compared"] > 10_000, name
        assert result["slots_per_chunk"] == slots[name], name
        assert result["num_graphs"] == 2 * sum(map(sum, slots[name])), name
        for index, step in enumerate(steps):
            warm = index < num_warmup
            captures = sum(slots[name][0]) if index == num_warmup else 0
            assert step["captures"] == captures, f"{name} step {index}"
            replays = 0 if warm else num_chunks * counts[index]
            assert step["replays"] == replays, f"{name} step {index}"
            fallbacks = {"capture warmup": 1} if warm else {}
            assert step["fallbacks"] == fallbacks, f"{name} step {index}"


@pytest.mark.every_release
def test_one_rank(
    run_equal: Callable[..., Any],
    make_config: Callable[..., Any],
    in_both_scopes: Callable[..., Any],
) -> None:
    """PP 1: dropout with DDP; no DDP with two warmup steps and poison; tied in bfloat16."""
    cases = {
        "ddp": {"config": make_config(model=_DROPOUT, train={"num_microbatches": [2, 5, 1, 3]})},
        "no_ddp": {
            "config": make_config(
                model={"num_layers": 2, "swiglu": True, "normalization": "RMSNorm"},
                train={"num_microbatches": [1, 2, 4, 1], "use_ddp": False},
                capture={"num_warmup_steps": 2, "verify": "poison"},
            )
        },
        "tied": {
            "config": make_config(
                model={
                    "num_layers": 2,
                    "untie_embeddings_and_output_weights": False,
                    "position_embedding_type": "learned_absolute",
                    "params_dtype": "bfloat16",
                },
            )
        },
    }
    slots = {name: [[1]] for name in cases}
    cases = in_both_scopes(cases)
    _check(run_equal(cases, 1), cases, slots)


@pytest.mark.slow
@pytest.mark.every_release
def test_two_ranks(
    run_equal: Callable[..., Any],
    make_config: Callable[..., Any],
    in_both_scopes: Callable[..., Any],
    once: Callable[..., Any],
) -> None:
    """PP 2, PP 2 x VPP 2 (with group tails), TP 2, DP 2 with all of DDP's overlap."""
    overlap = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    cases = {
        "pp2": {
            "config": make_config(
                model={
                    **_DROPOUT,
                    "num_layers": 4,
                    "untie_embeddings_and_output_weights": False,
                },
                pipeline=_pipeline(2),
                train={"num_microbatches": [2, 1, 5, 3]},
            )
        },
        "tp2": {
            "config": make_config(model=_SHALLOW, pipeline=_pipeline(tensor_model_parallel_size=2))
        },
    }
    # Also with older releases: their interleaved schedule, and all of their DDP.
    in_each = {
        "pp2_vpp2": {
            "config": make_config(
                model=_DROPOUT,
                pipeline=_pipeline(2, 2),
                train={"num_microbatches": [4, 2, 6], "overlap_grad_reduce": True},
            )
        },
        "dp2": {
            "config": make_config(
                model=_SHALLOW,
                pipeline=_pipeline(data_parallel_size=2),
                train={"num_microbatches": [2, 1, 3, 2], **overlap},
                capture={"verify": "shadow", "num_verify_steps": 2},
            ),
            # Small buckets, so that several are dispatched while the backward runs.
            "ddp_options": {"bucket_size": 8000, "overlap_param_gather": True},
        },
    }
    tails = {
        "pipeline": _pipeline(2, 2, microbatch_group_size_per_vp_stage=3),
        "train": {"num_microbatches": [5, 3, 8]},
    }
    # In one scope: Megatron has no part in slots.
    others = {
        "pp2_vpp2_tails": {
            "config": make_config(
                model=_DROPOUT, capture={"verify": "poison", "scope": "chunk"}, **tails
            )
        },
    }
    slots = {
        "pp2": [[2], [1]],
        "pp2_vpp2": [[4, 2], [3, 1]],
        "pp2_vpp2_tails": [[6, 3], [4, 2]],
        "tp2": [[1], [1]],
        "dp2": [[1], [1]],
    }
    cases = {**in_both_scopes(in_each), **once({**in_both_scopes(cases), **others})}
    _check(run_equal(cases, 2), cases, slots)


@pytest.mark.slow
def test_four_ranks(
    run_equal: Callable[..., Any],
    make_config: Callable[..., Any],
    in_both_scopes: Callable[..., Any],
) -> None:
    """PP 4 x VPP 2, and DP 2 x PP 2 x VPP 2 with overlapped reduction."""
    cases = {
        "dp2_pp2_vpp2": {
            "config": make_config(
                model=_DROPOUT,
                pipeline=_pipeline(2, 2, data_parallel_size=2),
                train={
                    "num_microbatches": [2, 6, 4],
                    "overlap_grad_reduce": True,
                    "use_distributed_optimizer": True,
                },
            ),
            "ddp_options": {"bucket_size": 8000, "overlap_param_gather": True},
        },
    }
    deep = {
        "pp4_vpp2": {
            "config": make_config(
                model={**_DROPOUT, "num_layers": 8},
                pipeline=_pipeline(4, 2),
                train={"num_microbatches": [4, 12]},
            )
        },
    }
    slots = {
        "pp4_vpp2": [[8, 4], [8, 4], [7, 3], [5, 1]],
        "dp2_pp2_vpp2": [[4, 2], [4, 2], [3, 1], [3, 1]],
    }
    cases = {**in_both_scopes(cases), **deep}
    _check(run_equal(cases, 4), cases, slots)
