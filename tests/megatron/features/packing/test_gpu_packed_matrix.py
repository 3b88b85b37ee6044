"""Packed documents on real GPUs: every kind of model, context parallelism and pipelines.

Every step of a case has other packings and numbers of microbatches than the capture. Layers are
Transformer Engine's in bfloat16. Each case equals eager training on the same padded rows to the
last bit. `test_packed_gpu` has attention alone, `test_gpu_hybrid` most of the hybrid models.

Four ranks on two GPUs need `NCCL_MULTI_RANK_GPU_ENABLE=1` and a release of NCCL that supports it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mamba_needs
import packed_cases
import pytest
from training_needs import NEEDS_ENGINE

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(590), NEEDS_ENGINE]

_BLOCK: dict[str, Any] = {"capture": {"scope": "block"}}
_CHUNK: dict[str, Any] = {"capture": {"scope": "chunk"}}
_POISON: dict[str, Any] = {"capture": {"scope": "chunk", "verify": "poison"}}
_PP2 = {"pipeline_model_parallel_size": 2}
_VPP2 = {**_PP2, "virtual_pipeline_model_parallel_size": 2}
# Enough for the fused kernel of RoPE to start by row.
_MANY = {"packing": {"max_packed_seqs": 80, "seq_buckets": []}}
_CP2, _CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
_BY_SEQUENCE = {"moe": {"moe_router_load_balancing_type": "seq_aux_loss"}}

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def make(
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
    num_packings: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> Make:
    """Return a function that makes a case of one kind of model."""
    monkeypatch.setenv("MAMBA_DETERMINISTIC", "1")
    # From 64 tokens on, all pieces for four ranks have a token (docs/packed_sequences.md).
    texts = {
        "short": write_documents(range(9, 110), 200),
        "longer": write_documents(range(64, 110), 200, "longer.txt"),
        # Documents of one block or two.
        "blocks": write_documents(range(9, 250), 200, "blocks.txt"),
    }

    def case(
        kind: str, counts: list[int], *options: dict[str, Any], text: str = "short"
    ) -> dict[str, Any]:
        together = {name: value for part in options for name, value in part.items()}
        result = packed_cases.gpu_case(texts[text], make_config, kind, counts, **together)
        assert num_packings(result) > 3
        return result

    return case


def _check(results: dict[str, dict[str, Any]]) -> None:
    """Check that all steps after the first replay, each on different documents."""
    packed_cases.all_but_the_first_replay(results)
    for name, result in results.items():
        steps = result["steps"]
        assert not any(step["fallbacks"] for step in steps[1:]), name
        if "experts" in name:
            assert all(step["expert_metrics"]["z_loss"] > 0 for step in steps), name
            assert result["dropped_tokens"] > 0, name


@pytest.mark.gpu
def test_one_gpu(run_equal: Callable[..., Any], make: Make) -> None:
    counts = [2, 3, 1, 4, 2]
    cases = {
        "latent": make("latent", counts, _CHUNK),
        "latent_block": make("latent", counts, {"capture": {"verify": "poison"}}),
        "latent_unfused": make("latent_unfused", counts, _CHUNK),
        "experts": make("experts", counts, _POISON),
        "experts_block": make("experts", counts, _BLOCK, _BY_SEQUENCE),
        "latent_experts": make("latent_experts", counts, _CHUNK),
    }
    _check(run_equal(cases, 1, timeout_s=580.0))


@pytest.mark.multigpu
def test_two_ranks(run_equal: Callable[..., Any], make: Make) -> None:
    shared, flying = [2, 3, 1, 2, 4], [4, 2, 6, 1, 3]
    cases = {
        "attention_by_row_cp2": make("attention", shared, _CP2, _CHUNK, _MANY),
        "attention_by_row_pp2_vpp2": make("attention", [4, 2, 6, 2, 4], _VPP2, _POISON, _MANY),
        "latent_cp2": make("latent", shared, _CP2, _CHUNK),
        "latent_unfused_cp2": make("latent_unfused", shared, _CP2, _POISON),
        "experts_cp2": make("experts", shared, _CP2, _CHUNK),
        "experts_by_sequence_cp2": make("experts", shared, _CP2, _BLOCK, _BY_SEQUENCE),
        "latent_pp2": make("latent", flying, _PP2, _CHUNK),
        "latent_pp2_vpp2": make("latent_unfused", [4, 2, 6, 2, 4], _VPP2, _POISON),
        "experts_pp2": make("experts", flying, _PP2, _CHUNK),
        "experts_ep2": make(
            "experts",
            shared,
            {"data_parallel_size": 2, "expert_model_parallel_size": 2},
            _CHUNK,
        ),
    }
    if not mamba_needs.missing_kernels():
        cases["hybrid_cp2"] = make("hybrid", shared, _CP2, _CHUNK)
        cases["hybrid_cp2_block"] = make("hybrid", shared, _CP2, {"capture": {"verify": "poison"}})
        # Padding between documents counts; Mamba's kernels have blocks of 128 rows.
        apart = {"packing": {"max_packed_tokens": 1024, "pad_seq_to_mult": 128}}
        for name, more in {"cp2": (shared, _CP2), "pp2": (flying, _PP2)}.items():
            cases[f"apart_{name}"] = make("hybrid", *more, _CHUNK, apart, text="blocks")
    _check(run_equal(cases, 2, timeout_s=580.0))


_SHARED, _FLYING = [2, 3, 1, 2, 4], [4, 2, 6, 1, 3]
_BOTH = {**_CP2, **_PP2}


@pytest.mark.multigpu(4)
def test_four_ranks(run_equal: Callable[..., Any], make: Make) -> None:
    cases = {
        "attention_cp4": make("attention", _SHARED, _CP4, _CHUNK),
        "latent_cp4": make("latent", _SHARED, _CP4, _CHUNK),
        "experts_cp4": make("experts", _SHARED, _CP4, _CHUNK),
        "attention_cp2_pp2": make("attention", _FLYING, _BOTH, _CHUNK),
        "latent_cp2_pp2": make("latent", _FLYING, _BOTH, _CHUNK),
        "latent_unfused_cp2_pp2": make("latent_unfused", _FLYING, _BOTH, _BLOCK),
        "experts_cp2_pp2": make("experts", _FLYING, _BOTH, _CHUNK),
    }
    if not mamba_needs.missing_kernels():
        cases["hybrid_cp4"] = make("hybrid", _SHARED, _CP4, _CHUNK)
        cases["hybrid_cp2_pp2"] = make("hybrid", _FLYING, _BOTH, _CHUNK)
    _check(run_equal(cases, 4, timeout_s=580.0))


@pytest.mark.multigpu(4)
@pytest.mark.parametrize("text", ["longer", "short"])
def test_heads_that_share_keys_on_four_ranks(
    run_equal: Callable[..., Any], make: Make, text: str
) -> None:
    """Short documents with CP 4 are equal only if their padding counts as tokens."""
    cases = {
        "cp4": make("grouped", _SHARED, _CP4, _CHUNK, text=text),
        "cp2_pp2": make("grouped", _FLYING, _BOTH, _CHUNK, text=text),
    }
    _check(run_equal(cases, 4, timeout_s=580.0))
