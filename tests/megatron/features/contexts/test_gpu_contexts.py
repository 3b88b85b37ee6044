"""Context-parallel sizes that change between microbatches, on real GPUs: equal to eager.

Transformer Engine's deterministic attention of packed sequences takes about 128 bytes for each of
sequences x heads x length x length in a backward, and refuses 2**30 of them, so all are small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from context_sizes import check_sizes, packing_of
from packed_cases import EXPERTS, LATENT, gpu_case
from training_needs import NEEDS_ENGINE

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300), NEEDS_ENGINE]

_ROWS = 256
_STEPS = 30


@pytest.fixture
def make_case(make_config: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Make a bfloat16 model on the shipped text, whose documents need one to four ranks."""

    def make(
        sizes: list[int],
        *,
        counts: tuple[int, ...] = (2, 4, 1),
        schedule: str = "random",
        captured: tuple[int, ...] = (),
        seq_buckets: tuple[int, ...] = (),
        num_steps: int = _STEPS,
        **more: Any,
    ) -> dict[str, Any]:
        return gpu_case(
            None,
            make_config,
            "attention",
            [counts[i % len(counts)] for i in range(num_steps)],
            train={"lr": 2e-5, "deterministic": False},
            packing=packing_of(
                sizes, _ROWS, schedule=schedule, captured=captured, seq_buckets=seq_buckets
            ),
            **more,
        )

    return make


@pytest.fixture
def run_sizes(run_equal: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return a runner of cases that checks equality with eager, and which sizes replay."""

    def run(cases: dict[str, dict[str, Any]], num_ranks: int, timeout_s: float = 280.0) -> Any:
        results = run_equal(cases, num_ranks, timeout_s=timeout_s)
        for name, result in results.items():
            check_sizes(name, result, cases[name])
        return results

    return run


_EXPERTS = {**EXPERTS, "moe_ffn_hidden_size": 128, "moe_expert_capacity_factor": 2.0}


@pytest.mark.multigpu
def test_latent_attention_and_experts(
    run_sizes: Callable[..., Any], make_case: Callable[..., dict[str, Any]]
) -> None:
    """Experts on one and several ranks, both position embeddings, and a size without graphs."""
    small = {"model": {"num_layers": 2}, "data_parallel_size": 2, "num_steps": 9}
    unfused = {**LATENT, "apply_rope_fusion": False}
    cases = {
        "latent_experts": make_case([1, 2], moe=_EXPERTS, options=LATENT, **small),
        "ep2": make_case(
            [1, 2],
            moe={**_EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss"},
            expert_model_parallel_size=2,
            capture={"scope": "chunk", "verify": "poison"},
            **small,
        ),
        "limited": make_case([1, 2], captured=(2,), options=LATENT, **small),
        "unfused": make_case([1, 2], options=unfused, capture={"scope": "chunk"}, **small),
    }
    run_sizes(cases, 2)


@pytest.mark.multigpu
def test_two_gpus(
    run_equal: Callable[..., Any],
    make_case: Callable[..., dict[str, Any]],
    without_sequences: Callable[[dict[str, Any]], set[str]],
) -> None:
    cases = {
        "cp2": make_case([1, 2], data_parallel_size=2, capture={"scope": "chunk"}, num_steps=12),
        "fewer": make_case([1, 2], seq_buckets=(2, 3), data_parallel_size=2, num_steps=12),
    }
    results = run_equal(cases, 2, timeout_s=140.0)
    fewer = without_sequences(results["fewer"])
    assert len({bank.partition(", ")[2] for bank in fewer}) > 1
    for name, result in results.items():
        check_sizes(name, result, cases[name])


_PP2 = {"pipeline_model_parallel_size": 2, "data_parallel_size": 2}
_TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "data_parallel_size": 2}
_CHUNK = {"scope": "chunk"}
_ON_FOUR: dict[str, tuple[list[int], dict[str, Any]]] = {
    "cp4": ([1, 2, 4], {"data_parallel_size": 4}),
    "pp2_cp2": ([1, 2], {"capture": _CHUNK, **_PP2}),
    "tp2_cp2": ([1, 2], _TP2),
    "cp4_smallest_unfused": (
        [1, 2, 4],
        {
            "schedule": "smallest",
            "counts": (2, 6),
            "capture": {**_CHUNK, "verify": "poison"},
            "options": {"apply_rope_fusion": False},
            "data_parallel_size": 4,
            "num_steps": 6,
        },
    ),
    "limited": ([1, 2, 4], {"captured": (2, 4), "data_parallel_size": 4, "num_steps": 8}),
    "grouped": (
        [1, 2, 4],
        {"options": {"num_query_groups": 2}, "data_parallel_size": 4, "num_steps": 8},
    ),
}


@pytest.mark.multigpu(4)
@pytest.mark.parametrize("name", _ON_FOUR)
def test_four_gpus(
    run_sizes: Callable[..., Any], make_case: Callable[..., dict[str, Any]], name: str
) -> None:
    sizes, settings = _ON_FOUR[name]
    cases = {name: make_case(sizes, **settings)}
    run_sizes(cases, 4)
