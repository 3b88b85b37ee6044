"""Packed documents through Transformer Engine's layers on real GPUs equal eager.

Sequences are short and few: under `NVTE_ALLOW_NONDETERMINISTIC_ALGO=0` Transformer Engine has no
attention on Hopper for `sequences * heads * longest**2` of 2**30 or more, and its kernels take some
hundred bytes of workspace for each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packed_cases import all_but_the_first_replay, gpu_case
from small_settings import RECOMPUTED
from training_needs import NEEDS_ENGINE

from chunkgraph.packing import PackedShape, pack

Case = Callable[..., dict[str, Any]]

pytestmark = NEEDS_ENGINE

_UNFUSED = {"apply_rope_fusion": False}
# Enough for the fused kernel to start by row; `test_rope` shows which kernel that is.
_MANY = {"max_packed_seqs": 80, "seq_buckets": []}
_CASES = {
    "fused_rope_block": ({}, {"scope": "block", "verify": "poison"}, {}),
    "fused_rope_chunk": ({}, {"scope": "chunk"}, {}),
    "unfused_rope_block": ({}, {"scope": "block"}, _UNFUSED),
    "unfused_rope_chunk": ({}, {"scope": "chunk", "verify": "shadow"}, _UNFUSED),
    "many_empty_sequences": ({"max_packed_seqs": 16}, {"scope": "chunk"}, {}),
    "rope_by_row": (_MANY, {"scope": "chunk", "verify": "poison"}, {}),
    "rope_by_row_shadow": (
        _MANY,
        {"scope": "block", "verify": "shadow"},
        {},
    ),
    "rope_by_row_recompute": (
        _MANY,
        {"scope": "chunk"},
        RECOMPUTED,
    ),
    # Eager training then uses Transformer Engine's own kernel by row.
    "rope_by_row_of_300": (
        {"max_packed_seqs": 300, "seq_buckets": []},
        {"scope": "chunk", "verify": "poison"},
        {},
    ),
    "recompute": (
        {},
        {"scope": "chunk"},
        {
            **_UNFUSED,
            **RECOMPUTED,
        },
    ),
    "fewer_sequences": ({"max_packed_seqs": 80}, {"scope": "chunk", "verify": "poison"}, {}),
    "grouped_queries": ({}, {"scope": "chunk"}, {"num_query_groups": 2}),
}


@pytest.fixture
def make_case(make_config: Callable[..., Any], write_documents: Callable[..., Path]) -> Case:
    """Return a maker of models on documents of 30 to 150 tokens: two to seven in 256."""
    text = write_documents(range(29, 150), 200)

    def make(
        counts: list[int],
        packing: dict[str, Any],
        capture: dict[str, Any],
        options: dict[str, Any],
    ) -> dict[str, Any]:
        packing = {"max_packed_seqs": 9, **packing}
        more: dict[str, Any] = {"packing": packing, "capture": capture, "options": options}
        train = {"deterministic": False}
        return gpu_case(text, make_config, "attention", counts, train=train, **more)

    return make


@pytest.mark.gpu
@pytest.mark.megatron
@pytest.mark.timeout(500)
def test_one_gpu(run_equal: Callable[..., Any], make_case: Case) -> None:
    cases = {name: make_case([2, 3, 1, 4], *case) for name, case in _CASES.items()}
    all_but_the_first_replay(run_equal(cases, 1, timeout_s=480.0))


@pytest.mark.gpu
@pytest.mark.megatron
@pytest.mark.timeout(300)
def test_sliding_window(run_equal: Callable[..., Any], make_case: Case) -> None:
    """The window is narrower than most documents: tokens see the 40 before them."""
    options = {"window_size": [40, 0]}
    cases = {
        "block": make_case([2, 3, 1, 4], {}, {"scope": "block", "verify": "poison"}, options),
        "chunk": make_case([2, 3, 1, 4], {}, {"scope": "chunk"}, options),
        "whole": make_case([2, 3, 1, 4], {}, {"scope": "chunk"}, {}),
    }
    results = run_equal(cases, 1, timeout_s=280.0)
    all_but_the_first_replay(results)
    losses = [[s["loss"] for s in results[n]["steps"]] for n in ("chunk", "whole")]
    assert losses[0] != losses[1]


@pytest.mark.gpu
@pytest.mark.megatron
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8(run_equal: Callable[..., Any], make_case: Case, recipe: str) -> None:
    """A slot's graphs continue from each other's scales and share cached weights."""
    options = {"fp8": "hybrid", "fp8_recipe": recipe}
    packing = {"buckets": [0.5], "seq_buckets": [3, 5]}
    cases = {
        "one_shape": make_case([2, 3, 1, 4], {}, {"scope": "chunk"}, options),
        "block": make_case([2, 3, 1, 4], packing, {"scope": "block", "verify": "poison"}, options),
        "chunk": make_case([2, 3, 1, 4], packing, {"scope": "chunk"}, options),
    }
    results = run_equal(cases, 1, timeout_s=280.0)
    all_but_the_first_replay(results)
    for name in ("block", "chunk"):
        assert len(results[name]["replays_of_bank"][0]) > 1, name


@pytest.mark.gpu
@pytest.mark.megatron
@pytest.mark.timeout(300)
def test_offsets_for_the_most_sequences_are_cut(
    run_equal: Callable[..., Any], make_case: Case, write_documents: Callable[..., Path]
) -> None:
    """Eager training keeps them, for 80 sequences; graphs have 32, or 3, 5 and 80."""
    cases_of_kinds = {
        "by_default": make_case([2, 3, 1, 4], {"max_packed_seqs": 80}, {"scope": "chunk"}, {}),
        "several": make_case(
            [2, 3, 1, 4],
            {"max_packed_seqs": 80, "seq_buckets": [3, 5], "buckets": [0.5]},
            {"scope": "block", "verify": "poison"},
            {},
        ),
        "unfused": make_case([2, 3, 1, 4], {"max_packed_seqs": 80}, {"scope": "chunk"}, _UNFUSED),
    }
    cases = {name: {**case, "offsets": "most"} for name, case in cases_of_kinds.items()}
    results = run_equal(cases, 1, timeout_s=280.0)
    all_but_the_first_replay(results)
    for name in ("by_default", "unfused"):
        assert set(results[name]["replays_of_bank"][0]) == {"256 tokens, 32 sequences"}, name
    assert len(results["several"]["replays_of_bank"][0]) > 1


@pytest.mark.gpu
def test_ranks_hold_the_rows_that_transformer_engine_gives_them() -> None:
    """Its kernels assume which rows of a document a rank has."""
    import torch

    importlib.import_module("transformer_engine.pytorch")  # the import finds the library
    tex = importlib.import_module("transformer_engine_torch")
    for size in (2, 4):
        packed = pack([7, 30, 1, 64, 5], PackedShape(9, 256, context_parallel_size=size))
        offsets = torch.from_numpy(packed.cu_seqlens_padded).cuda()
        for rank in range(size):
            expected = tex.thd_get_partitioned_indices(offsets, 256, size, rank)
            assert packed.rows_of_rank(rank).tolist() == expected.tolist()


@pytest.mark.gpu
@pytest.mark.megatron
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [{}, _UNFUSED], ids=["fused", "unfused"])
def test_nothing_in_a_replayed_step_waits_for_the_device(
    run_cases: Callable[..., Any],
    make_case: Case,
    options: dict[str, Any],
) -> None:
    case = make_case([2, 3, 4], {}, {"scope": "chunk"}, options)
    result = run_cases({"probe": {**case, "probe": "packed"}}, 1, timeout_s=280.0)["probe"]
    assert result["replays"] == 7
