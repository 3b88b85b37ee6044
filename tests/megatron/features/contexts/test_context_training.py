"""Whole jobs with a context-parallel size for each microbatch equal eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from context_sizes import check_sizes, packing_of
from expert_cases import EXPERTS
from packed_cases import HAS_LATENT, SMALL_LATENT, cpu_case

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

_ROWS = 12
Case = Callable[..., dict[str, Any]]


@pytest.fixture
def make_case(make_config: Callable[..., Any], write_documents: Callable[..., Path]) -> Case:
    """Make a run on documents of 2 to 40 bytes, with 12 rows per rank."""
    path = write_documents([2, 5, 8, 20, 38], num_documents=60)

    def make(
        counts: list[int],
        sizes: list[int],
        *,
        model: dict[str, Any] | None = None,
        schedule: str = "random",
        captured: tuple[int, ...] = (),
        seq_buckets: tuple[int, ...] = (),
        **more: Any,
    ) -> dict[str, Any]:
        packing = packing_of(
            sizes, _ROWS, schedule=schedule, captured=captured, seq_buckets=seq_buckets
        )
        model = {"layer_spec": "user_specs:packed_contexts", **(model or {})}
        return cpu_case(
            path, make_config, "attention", counts, model=model, packing=packing, **more
        )

    return make


def check(name: str, result: dict[str, Any], case: dict[str, Any]) -> None:
    """Check losses, and which steps replay; see `check_sizes`."""
    assert len({s["loss"] for s in result["steps"]}) == len(result["steps"]), name
    check_sizes(name, result, case)


@pytest.mark.slow
def test_four_ranks(
    run_equal: Callable[..., Any],
    make_case: Case,
    without_sequences: Callable[[dict[str, Any]], set[str]],
) -> None:
    dp4 = {"data_parallel_size": 4, "model": {"num_layers": 1}}
    chunk, poison = {"scope": "chunk"}, {"verify": "poison"}
    deep = {"num_layers": 4, "hidden_dropout": 0.1}
    sharded = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    vpp2 = {
        "pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    tp2 = {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "model": {"num_layers": 1}}
    cases = {
        "random": make_case([1] * 6, [1, 2, 4], capture=poison, **dp4),
        "smallest": make_case(
            [1, 1, 4], [1, 2, 4], schedule="smallest", capture=chunk, train=sharded, **dp4
        ),
        "pp2_vpp2": make_case(
            [2, 4], [1, 2], seq_buckets=(2, 3), model=deep, capture={**chunk, **poison}, **vpp2
        ),
        "tp2": make_case([1] * 4, [1, 2], captured=(2,), capture=chunk, **tp2),
        "grouped": make_case([1] * 3, [1, 2], options={"num_query_groups": 2}, **dp4),
    }
    results = run_equal(cases, 4)
    fewer = without_sequences(results["pp2_vpp2"])
    assert {bank.partition(", ")[2] for bank in fewer} >= {"2 sequences", "3 sequences"}
    for name, result in results.items():
        check(name, result, cases[name])
    # Some ranks replay one size while others replay another.
    last = results["smallest"]["steps"][-1]["context_sizes"]
    assert last[0] != last[3]
    losses_do_not_depend_on_who_shares_what(results["random"], results["smallest"])
    without_a_bank_the_step_is_eager(results["tp2"])


_EXPERTS = {**EXPERTS, "moe_expert_capacity_factor": 2.0}


@pytest.mark.slow
def test_latent_attention_and_experts(run_equal: Callable[..., Any], make_case: Case) -> None:
    """Routers and tables cover the tokens of all ranks that share a microbatch."""
    spec = "packed_contexts_latent_experts" if HAS_LATENT else "packed_contexts_experts"
    model = {"num_layers": 1, "swiglu": True, "normalization": "LayerNorm"}
    model["layer_spec"] = f"user_specs:{spec}"
    common = {"model": model, "options": SMALL_LATENT if HAS_LATENT else {}}
    dp4 = {**common, "data_parallel_size": 4}
    no_losses = {**_EXPERTS, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    cases = {
        "random": make_case(
            [1, 1, 4], [1, 2, 4], moe=no_losses, capture={"verify": "poison"}, **dp4
        ),
        "smallest": make_case([1] * 2, [1, 2, 4], schedule="smallest", moe=no_losses, **dp4),
        "losses": make_case([1, 3], [1, 2, 4], moe=_EXPERTS, capture={"scope": "chunk"}, **dp4),
        "ep2_pp2": make_case(
            [2, 3, 1],
            [1, 2],
            moe={**_EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss"},
            pipeline_model_parallel_size=2,
            data_parallel_size=2,
            expert_model_parallel_size=2,
            **{**common, "model": {**model, "num_layers": 2}},
        ),
    }
    results = run_equal(cases, 4)
    for name, result in results.items():
        if name != "smallest":
            check(name, result, cases[name])
        for step in result["steps"]:
            assert step["different"] == [], name
            assert bool(step["expert_metrics"]) == (name in ("losses", "ep2_pp2")), name
    losses_do_not_depend_on_who_shares_what(results["random"], results["smallest"])


# Later layers' collectives would wait for the rank that fails.
_FAULTY = {"layer_spec": "context_specs:faulty", "num_layers": 1}


def test_two_ranks(run_equal: Callable[..., Any], make_case: Case) -> None:
    """Also with a size whose capture fails on one rank: all ranks go on without its graphs."""
    dp2 = {"data_parallel_size": 2}
    cases = {
        "random": make_case([2, 3], [1, 2], **dp2),
        "faulty": make_case([1] * 6, [1, 2], model=_FAULTY, **dp2),
    }
    results = run_equal(cases, 2)
    check("random", results["random"], cases["random"])
    first, *steps = results["faulty"]["steps"]
    assert first["fallbacks"] == {"capture warmup": 1}
    without = [{2} & {s for rank in step["context_sizes"] for s in rank} for step in steps]
    assert 0 < without.count(set()) < len(steps)
    for step, is_eager in zip(steps, without, strict=True):
        assert step["fallbacks"] == ({"no graphs of a bank": 1} if is_eager else {})
    why = f"no graphs of CP 2 with {_ROWS} tokens a rank: its capture failed"
    count = len(steps) - without.count(set())
    assert results["faulty"]["missing_banks"] == [{why: count}] * 2


@pytest.mark.slow
def test_experts_and_tensor_parallelism(run_equal: Callable[..., Any], make_case: Case) -> None:
    """Routers count tokens over all ranks that have rows of a microbatch.

    A single size equals Megatron's static context parallelism on the same documents.
    """
    latent = {"options": SMALL_LATENT} if HAS_LATENT else {}
    spec = "latent_experts" if HAS_LATENT else "experts"
    tp2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    dp2: dict[str, Any] = {"data_parallel_size": 2, **tp2}

    def of(spec: str) -> dict[str, Any]:
        model = {"num_layers": 1, "swiglu": True, "normalization": "LayerNorm"}
        return {"model": {**model, "layer_spec": f"context_specs:{spec}"}}

    two, static = (
        make_case([1, 1], [2], moe=_EXPERTS, **of(spec), **dp2)
        for spec in ("experts", "static_experts")
    )
    static["config"] |= {
        "pipeline": {"context_parallel_size": 2, **tp2},
        "packing": {"max_packed_seqs": 8, "max_packed_tokens": 2 * _ROWS},
    }
    cases = {
        "random": make_case(
            [2, 3],
            [1, 2],
            moe={
                **_EXPERTS,
                "moe_router_load_balancing_type": "seq_aux_loss",
                "moe_shared_expert_intermediate_size": 16,
            },
            capture={"verify": "poison", "scope": "chunk"},
            expert_model_parallel_size=2,
            **of(spec),
            **latent,
            **dp2,
        ),
        "two": two,
        "static": static,
    }
    results = run_equal(cases, 4)
    check("random", results["random"], cases["random"])
    assert all(len(step["expert_metrics"]) == 2 for step in results["random"]["steps"])
    # Megatron averages metrics over data-parallel ranks; here they are sums.
    assert _numbers(results["two"], 2) == _numbers(results["static"], 1)


def _numbers(result: dict[str, Any], num_copies: int) -> list[tuple[Any, ...]]:
    """Return each step's loss, gradient norm and router losses, to the last bit."""
    return [
        (
            step["loss"],
            step["grad_norm"],
            step["expert_metrics"]["load_balancing_loss"] / num_copies,
            step["expert_metrics"]["z_loss"],
        )
        for step in result["steps"]
    ]


def losses_do_not_depend_on_who_shares_what(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check runs with other groups of the same documents: equal up to the order of sums."""
    pairs = list(zip(one["steps"][:2], other["steps"][:2], strict=True))
    assert all(a["context_sizes"] != b["context_sizes"] for a, b in pairs)
    for key in ("loss", "grad_norm"):
        values = [a[key] for a, _ in pairs]
        assert values == pytest.approx([b[key] for _, b in pairs], rel=1e-4), key


def without_a_bank_the_step_is_eager(result: dict[str, Any]) -> None:
    """Check that such steps are counted, and that capture warmup precedes the first capture."""
    without = [s for s in result["steps"] if s["fallbacks"] == {"no graphs of a bank": 1}]
    assert 0 < len(without) < len(result["steps"]) - 1
    why = f"no graphs of CP 1 with {_ROWS} tokens a rank: they were not requested"
    assert result["missing_banks"] == [{why: len(without)}] * 4
