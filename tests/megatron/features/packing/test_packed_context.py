"""Packed documents that two ranks share (static context parallelism), on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from expert_cases import EXPERTS
from packed_cases import SMALL_MIXERS, cpu_case

from chunkgraph.data import Documents, read_documents

pytestmark = pytest.mark.timeout(150)

_TOKENS, _SIZE = 48, 2
_COUNTS = [3, 1, 2]
_ONE_LAYER: dict[str, Any] = {"model": {"num_layers": 1}}
_EXPERTS = {**EXPERTS, "moe_expert_capacity_factor": 2.0}
_WITH_EXPERTS: dict[str, Any] = {
    "spec": "context_specs:split_experts",
    "model": {"swiglu": True, "normalization": "LayerNorm", "num_layers": 1},
}
_HYBRID: dict[str, Any] = {
    "spec": "mamba_stand_in:packed_split",
    "model": {"hybrid_layer_pattern": "M*M", "num_layers": 3, **SMALL_MIXERS},
}
Case = Callable[..., dict[str, Any]]


@pytest.fixture
def text(write_documents: Callable[..., Path]) -> Path:
    """Write short documents of 3 to 23 bytes."""
    return write_documents(range(2, 23))


def _drawn(text: Path, seed: int, size: int) -> list[tuple[int, ...]]:
    documents = Documents(
        read_documents(text), num_tokens=_TOKENS, seed=seed, multiple=1 if size == 1 else 2 * size
    )
    return [documents.row(step, m).lengths for step, n in enumerate(_COUNTS) for m in range(n)]


@pytest.fixture
def make_case(make_config: Callable[..., Any], text: Path) -> Case:
    """Return a function that makes a run on these documents."""

    def make(
        counts: list[int],
        *,
        size: int = _SIZE,
        spec: str = "context_specs:split",
        seed: int = 1,
        seqs: int = 16,
        scope: str = "chunk",
        buckets: tuple[float, ...] = (),
        multiple: int = 1,
        verify: str = "none",
        model: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        return cpu_case(
            text,
            make_config,
            "attention",
            counts,
            model={"layer_spec": spec, **(model or {})},
            train={"seed": seed},
            packing={
                "max_packed_seqs": seqs,
                "max_packed_tokens": _TOKENS,
                "buckets": list(buckets),
                "pad_seq_to_mult": multiple,
            },
            capture={"scope": scope, "verify": verify},
            context_parallel_size=size,
            **more,
        )

    return make


def _check(results: dict[str, dict[str, Any]], overflows: dict[str, int] | None = None) -> None:
    for name, result in results.items():
        steps = result["steps"]
        assert len({s["loss"] for s in steps}) == len(steps), name
        overflow_steps = [s for s in steps[1:] if s["fallbacks"] == {"packing overflow": 1}]
        assert len(overflow_steps) == (overflows or {}).get(name, 0), name
        assert all(s["replays"] for s in steps[1:] if s not in overflow_steps), name


@pytest.mark.slow
@pytest.mark.every_release
@pytest.mark.megatron
def test_graphs_equal_eager(
    run_equal: Callable[..., Any],
    make_case: Case,
    text: Path,
    once: Callable[..., Any],
    num_packings: Callable[..., int],
) -> None:
    assert any(length % 4 for lengths in _drawn(text, 1, _SIZE) for length in lengths)
    documents = Documents(read_documents(text), num_tokens=_TOKENS, seed=1, multiple=4)
    is_too_long = [
        any(len(documents.row(step, m).lengths) > 3 for m in range(n))
        for step, n in enumerate([2, 3, 1, 2, 3, 1])
    ]
    assert sorted(set(is_too_long[1:])) == [False, True]
    cases = {
        # The other cases have attention of these rows too.
        **once(
            {
                "chunk": make_case([2, 3], model={"hidden_dropout": 0.1}, verify="shadow"),
                "padding_of_nan": make_case(
                    [2, 3, 1], spec="context_specs:split_poisoned", scope="block", verify="poison"
                ),
                "overflow": make_case([2, 3, 1, 2, 3, 1], seqs=4, **_ONE_LAYER),
                # Padding between documents counts; NaN fills the rows after them.
                "grouped": {
                    **make_case([2, 3], spec="context_specs:split_poisoned", verify="poison"),
                    "transformer_options": {"num_query_groups": 2},
                },
            }
        ),
        "experts": make_case([2, 3], moe=_EXPERTS, verify="poison", **_WITH_EXPERTS),
        "hybrid": make_case([2, 3], verify="poison", **_HYBRID),
        # Documents have multiples of 12 rows, with padding that counts.
        "apart": make_case([2, 3], verify="poison", multiple=6, **_HYBRID),
    }
    assert num_packings(cases["apart"]) > 2
    results = run_equal(cases, _SIZE)
    _check(results, {"overflow": sum(is_too_long[1:])})
    _check_experts(results["experts"])


@pytest.mark.megatron
@pytest.mark.slow
def test_a_pipeline(run_equal: Callable[..., Any], make_case: Case) -> None:
    cases = {
        "pp2_vpp2": make_case(
            [2, 4],
            model={"num_layers": 4},
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
        ),
        # Buckets have lengths of packings, which stages receive as without context parallelism.
        "pp2_buckets": make_case([2, 1, 3], buckets=(0.5, 40), pipeline_model_parallel_size=2),
        # Ranks share a group of heads, so each of them has it.
        "hybrid_pp2": make_case(
            [3, 1],
            pipeline_model_parallel_size=2,
            scope="block",
            **{
                **_HYBRID,
                "model": {
                    **_HYBRID["model"],
                    "hybrid_layer_pattern": "M*-M",
                    "num_layers": 4,
                    "mamba_num_groups": 1,
                },
            },
        ),
        "experts_pp2": make_case(
            [2, 1],
            moe=_EXPERTS,
            pipeline_model_parallel_size=2,
            **{**_WITH_EXPERTS, "model": {**_WITH_EXPERTS["model"], "num_layers": 2}},
        ),
        "cp4": make_case([2, 3], size=4, **_ONE_LAYER),
        "hybrid_cp4": make_case([2, 3], size=4, verify="poison", **_HYBRID),
        # Data-parallel ranks share experts, and each shares its documents with another rank.
        "ep2": make_case(
            [2, 3],
            moe={**_EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss"},
            data_parallel_size=2,
            expert_model_parallel_size=2,
            scope="block",
            **_WITH_EXPERTS,
        ),
    }
    results = run_equal(cases, 4)
    _check(results)
    _check_experts(results["ep2"])
    _check_experts(results["experts_pp2"])


def _check_experts(result: dict[str, Any]) -> None:
    for step in result["steps"]:
        assert step["different"] == []
        assert len(step["expert_metrics"]) == 2
