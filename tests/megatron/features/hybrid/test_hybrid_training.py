"""Hybrid models of Mamba, attention and feed-forward: chunk graphs equal eager to the last bit.

``mamba_stand_in`` stands in for Mamba's kernels; all else is Megatron's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packed_cases import all_but_the_first_replay, cpu_case
from small_settings import RECOMPUTED

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

_TOKENS = 14
_KNOWS_STAGES = importlib.util.find_spec("megatron.core.models.hybrid") is not None

Case = Callable[..., dict[str, Any]]


@pytest.fixture
def make_case(make_config: Callable[..., Any], write_documents: Callable[..., Path]) -> Case:
    """Make a run of a hybrid model; ``packed`` on documents of 3 to 8 bytes."""
    path = write_documents(range(2, 8))

    def make(
        pattern: str,
        counts: list[int],
        *,
        pp: int = 1,
        vpp: int | None = None,
        packed: bool = False,
        model: dict[str, Any] | None = None,
        packing: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        case = cpu_case(
            path,
            make_config,
            "hybrid",
            counts,
            model={
                "seq_length": 6,
                "num_layers": len(pattern.replace("|", "")),
                "hybrid_layer_pattern": pattern,
                "layer_spec": f"mamba_stand_in:{'packed' if packed else 'local'}",
                **(model or {}),
            },
            packing={"max_packed_seqs": 8, "max_packed_tokens": _TOKENS, **(packing or {})},
            train={"micro_batch_size": 1 if packed else 2},
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            **more,
        )
        if not packed:
            del case["config"]["packing"], case["config"]["data"]
        return case

    return make


@pytest.mark.every_release
def test_one_rank(
    run_equal: Callable[..., Any],
    make_case: Case,
    once: Callable[..., Any],
    num_packings: Callable[..., int],
) -> None:
    chunk = {"scope": "chunk"}
    cases = {
        "block": make_case("M-M*-", [2, 3], capture={"verify": "poison"}),
        **once(
            {
                "chunk": make_case(
                    "M*M",
                    [1, 2],
                    capture={**chunk, "verify": "shadow"},
                    model={"hidden_dropout": 0.1},
                )
            }
        ),
        "packed_chunk": make_case(
            "M*M",
            [2, 3],
            packed=True,
            capture={**chunk, "verify": "poison"},
            packing={"buckets": [0.75]},
        ),
        # Documents of six or twelve rows, with padding between them.
        "packed_apart": make_case(
            "M*M",
            [2, 3],
            packed=True,
            capture={"verify": "poison"},
            packing={"pad_seq_to_mult": 6, "max_packed_tokens": 36},
        ),
    }
    assert num_packings(cases["packed_apart"]) > 2
    if _KNOWS_STAGES:
        cases["recompute"] = make_case("M*", [1, 2], packed=True, model=RECOMPUTED)
    all_but_the_first_replay(run_equal(cases, 1))


@pytest.mark.slow
def test_two_ranks(run_equal: Callable[..., Any], make_case: Case) -> None:
    """Two to four microbatches are in flight, each with its slot's documents."""
    chunk = {"scope": "chunk"}
    moe = {"num_moe_experts": 4, "moe_expert_capacity_factor": 1.0, "token_drops": "count"}
    swiglu = {"swiglu": True}
    cases = {
        "packed_experts": make_case("ME*E", [3, 2], pp=2, packed=True, moe=moe, model=swiglu),
        "block": make_case("M-M*", [3, 1], pp=2),
        "packed_chunk": make_case("M-|M*", [3, 4], pp=2, packed=True, capture=chunk),
        "tp2": make_case("M*", [2, 1], tensor_model_parallel_size=2),
    }
    if _KNOWS_STAGES:
        cases["uneven"] = make_case("M|*M-", [3, 1], pp=2, capture=chunk)
        cases["packed_interleaved"] = make_case(
            "M|*|-M|M", [2, 4], pp=2, vpp=2, packed=True, capture=chunk
        )
    all_but_the_first_replay(run_equal(cases, 2))


@pytest.mark.every_release
@pytest.mark.skipif(_KNOWS_STAGES, reason="this release can do it")
@pytest.mark.parametrize(
    ("pattern", "pipeline", "model"),
    [
        ("M|*|M|-", {"vpp": 2}, {}),
        ("M|*-", {}, {}),
        ("M|*", {}, RECOMPUTED),
    ],
)
def test_what_the_release_has_not_is_refused(
    run_to_its_end: Callable[..., Any],
    make_case: Case,
    pattern: str,
    pipeline: dict[str, Any],
    model: dict[str, Any],
) -> None:
    codes, texts = run_to_its_end(make_case(pattern, [2], pp=2, model=model, **pipeline))
    assert codes == [2, 2]
    assert all("no stages of different lengths" in text for text in texts)
