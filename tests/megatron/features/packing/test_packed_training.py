"""Whole jobs on packed documents: chunk graphs equal eager training to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_cases
import pytest
from expert_cases import EXPERTS
from extended_config import extended

from chunkgraph.data import Documents, read_documents
from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.packing import PackedShape

pytestmark = pytest.mark.timeout(150)

_TOKENS = 48
Case = Callable[..., dict[str, Any]]


@pytest.fixture
def make_case(make_config: Callable[..., Any], write_documents: Callable[..., Path]) -> Case:
    """Make a run on documents of 3 to 24 bytes, two to seven in a microbatch."""
    path = write_documents(range(2, 23))

    def make(
        counts: list[int],
        *,
        scope: str = "chunk",
        seqs: int = 16,
        pp: int = 1,
        vpp: int | None = None,
        dp: int = 1,
        verify: str = "none",
        model: dict[str, Any] | None = None,
        buckets: tuple[float, ...] = (),
        seq_buckets: tuple[int, ...] = (),
        path: Path = path,
        seed: int = 1234,
        **more: Any,
    ) -> dict[str, Any]:
        return packed_cases.cpu_case(
            path,
            make_config,
            "attention",
            counts,
            model={"num_layers": 2 * (vpp or 1), **(model or {})},
            train={"seed": seed},
            packing={
                "max_packed_seqs": seqs,
                "buckets": list(buckets),
                "seq_buckets": list(seq_buckets),
            },
            capture={"scope": scope, "verify": verify},
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            data_parallel_size=dp,
            **more,
        )

    return make


def _check(
    results: dict[str, dict[str, Any]], overflows: dict[str, list[int]] | None = None
) -> None:
    """Check that the first step and those of ``overflows`` are eager, and all others replay."""
    for name, result in results.items():
        steps = result["steps"]
        assert len({s["loss"] for s in steps}) == len(steps), name
        overflowing = (overflows or {}).get(name, [])
        for index, step in enumerate(steps):
            expected = {}
            if index == 0:
                expected = {"capture warmup": 1}
            if index in overflowing:
                expected = {"packing overflow": 1}
            assert step["fallbacks"] == expected, f"{name}, step {index}: {step}"
            assert bool(step["replays"]) == (not expected), f"{name}, step {index}"


@pytest.mark.slow
@pytest.mark.every_release
@pytest.mark.megatron
def test_one_rank(run_equal: Callable[..., Any], make_case: Case, once: Callable[..., Any]) -> None:
    cases = {
        # The same layers, without the parts of a chunk between them.
        **once({"block": make_case([2, 3, 1, 4], scope="block", verify="poison")}),
        "chunk": make_case([2, 3, 1, 4], model={"hidden_dropout": 0.1}, verify="shadow"),
        "positions": make_case(
            [2, 3], model={"position_embedding_type": "learned_absolute", "seq_length": _TOKENS}
        ),
    }
    _check(run_equal(cases, 1))


# The following tests without a `megatron` marker run once: they cover the engine and packings, and
# the marked tests cover Megatron's part.


@pytest.mark.megatron
def test_two_ranks(run_equal: Callable[..., Any], make_case: Case) -> None:
    """Pipelines whose ranks have two to four microbatches in flight."""
    recompute = {"recompute_granularity": "selective"}
    cases = {
        "pp2_block": make_case([3, 1, 5], scope="block", pp=2),
        "pp2_chunk": make_case([3, 1, 5], pp=2, model={**recompute, "hidden_dropout": 0.1}),
        "pp2_vpp2_block": make_case([2, 2, 4], scope="block", pp=2, vpp=2, model=recompute),
        "pp2_vpp2_chunk": make_case([2, 2, 4], pp=2, vpp=2, verify="poison"),
    }
    _check(run_equal(cases, 2))


@pytest.mark.slow
def test_overflow_on_one_of_two_pipelines(run_equal: Callable[..., Any], make_case: Case) -> None:
    """One data-parallel rank gets documents that do not fit in the middle of the run."""
    counts = [2, 3, 2, 1, 3, 2, 1]
    cases = {"dp2_pp2": make_case(counts, seqs=5, pp=2, dp=2)}
    with extended(cases["dp2_pp2"]["config"]) as config:
        pass
    text = read_documents(config.data.path)
    documents = Documents(text, num_tokens=_TOKENS, seed=config.train.seed)
    too_many = [
        [
            any(len(documents.row(step, m, rank).lengths) > 4 for m in range(count))
            for rank in (0, 1)
        ]
        for step, count in enumerate(counts)
    ]
    # One before the capture, which then waits, and one after it.
    assert [ranks for ranks in too_many if any(ranks)] == [[False, True]] * 2
    overflows = [step for step, ranks in enumerate(too_many) if any(ranks)]
    assert overflows == [1, 5]
    _check(run_equal(cases, 4), {"dp2_pp2": overflows})


_BUCKETS = (12, 0.75, 42)  # in rows of 48 tokens: 12 is never enough, but captured


def _lengths(case: dict[str, Any]) -> set[int]:
    """Return the buckets of a run's microbatches."""
    with extended(case["config"]) as config:
        shape = PackedShape(config.packing.max_packed_seqs, config.tokens_per_sequence)
    options = PackingOptions(shape, config.packing.buckets, config.packing.seq_buckets)
    banks = PackedBanks.of_model(options, config.pipeline)
    text = read_documents(config.data.path)
    documents = Documents(text, num_tokens=_TOKENS, seed=config.train.seed)
    return {
        key
        for rank in range(config.pipeline.data_parallel_size)
        for step, count in enumerate(config.train.num_microbatches)
        for key in banks.choose([documents.row(step, m, rank).lengths for m in range(count)])
    }


def test_length_buckets(run_equal: Callable[..., Any], make_case: Case) -> None:
    cases = {
        "block": make_case(
            [2, 3, 4], scope="block", model={"num_layers": 1}, verify="poison", buckets=_BUCKETS
        ),
        "chunk": make_case(
            [2, 3, 4], model={"num_layers": 1, "hidden_dropout": 0.1}, buckets=_BUCKETS
        ),
        "sequences": make_case(
            [2, 3, 4],
            model={"num_layers": 1, "hidden_dropout": 0.1},
            buckets=(42,),
            seq_buckets=(4, 5),
            verify="poison",
        ),
    }
    cases["cut"] = {**cases["sequences"], "offsets": "most"}
    assert _lengths(cases["block"]) == {36, 42, 48}
    results = run_equal(cases, 1)
    _check(results)
    # One slot with as many banks.
    captures = {name: result["steps"][1]["captures"] for name, result in results.items()}
    assert captures == {"block": 4, "chunk": 4, "sequences": 6, "cut": 6}
    assert results["cut"]["replays_of_bank"] == results["sequences"]["replays_of_bank"]
    (replays,) = results["sequences"]["replays_of_bank"]
    assert len(replays) > 2
    assert sum(replays.values()) == 7
    assert set(replays) <= {f"{t} tokens, {n} sequences" for t in (42, 48) for n in (4, 5, 16)}


@pytest.mark.slow
@pytest.mark.every_release
@pytest.mark.megatron
def test_tables_of_buckets_on_two_ranks(
    run_equal: Callable[..., Any], make_case: Case, write_documents: Callable[..., Path]
) -> None:
    """Captures make the short bucket's table: the warmup step has long microbatches alone.

    Later a short microbatch in the second slot follows a long one in the first.
    """
    path = write_documents([5, 46], name="short_and_long.txt")
    case = make_case([2, 4, 4], pp=2, buckets=(0.5,), path=path, seed=3)
    _check(run_equal({"pp2": case}, 2))


@pytest.mark.slow
def test_length_buckets_on_two_ranks(run_equal: Callable[..., Any], make_case: Case) -> None:
    """Stages receive tensors of several lengths, into slots and elsewhere; ranks share experts."""
    cases = {
        "pp2": make_case(
            [3, 1, 5], pp=2, model={"num_layers": 2}, buckets=(0.75, 42), seq_buckets=(4,)
        ),
        "pp2_vpp2": make_case([2, 4], scope="block", pp=2, vpp=2, buckets=(42,)),
        "ep2": make_case(
            [2, 3],
            moe=_EXPERTS,
            model=_SPARSE,
            dp=2,
            expert_model_parallel_size=2,
            buckets=(0.75, 42),
            seq_buckets=(4, 5),
        ),
    }
    assert all(len(_lengths(case)) > 1 for case in cases.values())
    _check(run_equal(cases, 2))


_EXPERTS = {**EXPERTS, "moe_expert_capacity_factor": 1.0, "token_drops": "count"}
_SPARSE = {"layer_spec": "user_specs:packed_experts", "swiglu": True, "num_layers": 2}


@pytest.mark.megatron
@pytest.mark.slow
def test_experts_on_two_ranks(run_equal: Callable[..., Any], make_case: Case) -> None:
    """Also if only one of the ranks that share experts has documents that do not fit."""
    biased = {
        **_EXPERTS,
        "moe_expert_capacity_factor": 2.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    gathered = {**_EXPERTS, "moe_token_dispatcher_type": "allgather"}
    ep2 = {"dp": 2, "expert_model_parallel_size": 2}
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    cases = {
        "ep2": make_case([2, 3, 2, 1, 3], moe=biased, model=_SPARSE, seqs=5, **ep2),
        "pp2_vpp2": make_case(
            [2, 4],
            pp=2,
            vpp=2,
            moe=_EXPERTS,
            model={**_SPARSE, "num_layers": 4, **recompute},
        ),
        "ep2_allgather": make_case([2, 1], moe=gathered, model=_SPARSE, scope="block", **ep2),
    }
    results = run_equal(cases, 2)
    _check(results, {"ep2": [1]})
    for name, result in results.items():
        assert all(step["expert_metrics"]["z_loss"] > 0 for step in result["steps"])
        assert (result["dropped_tokens"] > 0) == (name != "ep2")


_ROOMY = {**_EXPERTS, "moe_expert_capacity_factor": 2.0}
_STASH = {"enabled": True}


def _check_reruns(results: dict[str, dict[str, Any]], reruns: dict[str, list[str]]) -> None:
    """Check equality, the reasons of reruns, and that the last step replays."""
    for name, result in results.items():
        wrong = [s for s in result["steps"] if s["different"] != []]
        assert not wrong, f"{name}: {wrong}"
        assert result["different_parameters"] == {}, name
        assert result["dropped_tokens"] == 0, name
        assert result["capture_sessions"] == 1 + len(result["recaptures"]), name
        assert list(result["overflow_reruns"]) == reruns.get(name, []), name
        assert result["steps"][-1]["replays"], name


@pytest.mark.slow
@pytest.mark.megatron
def test_experts_that_stash_or_run_again(run_cases: Callable[..., Any], make_case: Case) -> None:
    """A step that runs again keeps the announced packings, buckets and misfit."""
    short = {**_STASH, "initial_bytes": 2048}
    drops = {**_EXPERTS, "token_drops": "rerun"}
    cases = {
        "stash": make_case([2, 1, 3], moe=_ROOMY, model=_SPARSE, stash=_STASH, verify="poison"),
        "rerun": make_case([2, 1, 3], moe=drops, model=_SPARSE, scope="block"),
        "buckets": make_case([2, 3, 2], moe=_ROOMY, model=_SPARSE, stash=short, buckets=(0.75,)),
    }
    results = run_cases(cases, 1, timeout_s=120.0)
    _check_reruns(results, {"rerun": ["expert capacity"], "buckets": ["stash pages"]})
    assert results["stash"]["stash_bytes"] < results["stash"]["bytes_without_stash"]


@pytest.mark.slow
@pytest.mark.megatron
def test_experts_of_split_sequences_in_a_pipeline(
    run_equal: Callable[..., Any], make_case: Case
) -> None:
    """PP 2 x TP 2: every tensor-parallel rank has its part of the padding on both stages."""
    case = make_case(
        [2, 1],
        pp=2,
        moe=_EXPERTS,
        model={**_SPARSE, "layer_spec": "user_specs:packed_experts_split"},
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    _check(run_equal({"pp2_tp2": case}, 4))


# Multi-latent attention with YARN on packed documents, on a CPU: chunk graphs equal eager.


@pytest.fixture
def make(
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a run of two layers on documents of 3 to 23 bytes."""
    if not packed_cases.HAS_LATENT:
        pytest.skip("this release's multi-latent attention cannot be built on a CPU")
    text = write_documents(range(2, 23))
    return lambda kind, counts, **more: packed_cases.cpu_case(
        text, make_config, kind, counts, **more
    )


@pytest.mark.megatron
@pytest.mark.every_release
def test_latent_attention(
    run_equal: Callable[..., Any], make: Callable[..., dict[str, Any]]
) -> None:
    cases = {
        "block": make("latent", [2, 3, 1], capture={"verify": "poison"}),
        "chunk": make("latent", [2, 3], capture={"scope": "chunk"}),
    }
    packed_cases.all_but_the_first_replay(run_equal(cases, 1))


@pytest.mark.megatron
@pytest.mark.slow
def test_latent_attention_on_two_ranks(
    run_equal: Callable[..., Any], make: Callable[..., dict[str, Any]]
) -> None:
    """Two stages, and two ranks that share every document."""
    chunk = {"capture": {"scope": "chunk"}}
    cases = {
        "pp2": make("latent", [3, 1, 2], pipeline_model_parallel_size=2, **chunk),
        "cp2": make("shared_latent", [2, 3], context_parallel_size=2),
    }
    packed_cases.all_but_the_first_replay(run_equal(cases, 2))
