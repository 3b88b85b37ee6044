"""Hybrid models with Mamba's Triton kernels and Transformer Engine on real GPUs equal eager.

These tests need mamba_ssm and causal_conv1d. Mamba's kernels repeat to the last bit only from
release 2.3 on, in a deterministic mode: ``MAMBA_DETERMINISTIC=1``, or
``torch.use_deterministic_algorithms(True)``, which ``train.deterministic`` sets. The mode adds up
gradients of the decay and the steps in a fixed order instead of with atomics. It uses one fixed
configuration of each kernel instead of the fastest one of this run (or, with Triton 3.4 and
``TRITON_CACHE_AUTOTUNING=1``, of an earlier run). Attention needs
``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``, which the ranks set.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mamba_needs
import pytest
from packed_cases import all_but_the_first_replay, gpu_case
from training_needs import NEEDS_ENGINE

_CHUNK = {"scope": "chunk"}
# Documents that begin at a block of Mamba's kernels.
_APART = {"pad_seq_to_mult": 128, "max_packed_tokens": 512}
# No multiple of the 64 rows whose documents causal-conv1d reads at once.
_ODD = {"max_packed_tokens": 250}

Case = Callable[..., dict[str, Any]]

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(500), NEEDS_ENGINE]


@pytest.fixture(autouse=True)
def _needs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := mamba_needs.missing_kernels():
        pytest.skip(missing)
    monkeypatch.setenv("MAMBA_DETERMINISTIC", "1")


@pytest.fixture
def make_case(make_config: Callable[..., Any], write_documents: Callable[..., Path]) -> Case:
    """Return a maker of cases, packed ones on documents of 30 to 150 tokens."""
    text = write_documents(range(29, 150), 200)

    def make(
        pattern: str,
        counts: list[int],
        capture: dict[str, Any],
        *,
        packed: bool = False,
        model: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        layers = {"hybrid_layer_pattern": pattern, "num_layers": len(pattern.replace("|", ""))}
        model = {**layers, **(model or {})}
        case = gpu_case(text, make_config, "hybrid", counts, capture=capture, model=model, **more)
        if not packed:
            del case["config"]["packing"], case["config"]["data"]
        return case

    return make


@pytest.mark.gpu
def test_one_gpu(
    run_equal: Callable[..., Any], make_case: Case, num_packings: Callable[..., int]
) -> None:
    case, counts = make_case, [2, 3, 1, 4]
    cases = {
        "block": case("M-M*-M", counts, {"verify": "poison"}),
        "chunk": case("M-M*-M", counts, {**_CHUNK, "verify": "shadow"}),
        "packed_block": case("M-M*-M", counts, {"verify": "poison"}, packed=True),
        "packed_chunk": case("M-M*-M", counts, _CHUNK, packed=True),
        "packed_apart": case("M-M*-M", counts, _CHUNK, packed=True, packing=_APART),
        "packed_odd": case("M-M*-M", counts, _CHUNK, packed=True, packing=_ODD),
        "packed_odd_block": case("M-M*-M", counts, {"verify": "poison"}, packed=True, packing=_ODD),
        "mamba_alone": case("MM", counts, _CHUNK, packed=True, packing={"buckets": [0.5]}),
    }
    assert min(num_packings(cases[name]) for name in ("packed_apart", "packed_odd")) > 3
    all_but_the_first_replay(run_equal(cases, 1, timeout_s=480.0))


@pytest.mark.multigpu
def test_two_gpus(run_equal: Callable[..., Any], make_case: Case) -> None:
    """Every microbatch in flight has its own ``seq_idx``."""

    def case(pattern: str, *args: Any, vpp: int | None = None, **options: Any) -> dict[str, Any]:
        sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": vpp}
        return make_case(pattern, [4, 2, 6], *args, **options, **sizes)

    cases = {
        "block": case("M-M|*-M", {}),
        "chunk": case("M-M*-M", _CHUNK),
        "packed_block": case("M-M|*-M", {}, packed=True),
        "packed_chunk": case("M-M|*-M", _CHUNK, packed=True),
        "packed_interleaved": case("M|-*|M-|M", _CHUNK, vpp=2, packed=True),
        # A rank's pieces have lengths that can be captured with cuDNN up to 9.15.
        "cp2": make_case(
            "M-M*-M", [2, 3, 1], _CHUNK, context_parallel_size=2, model={"seq_length": 4 * 128}
        ),
    }
    all_but_the_first_replay(run_equal(cases, 2, timeout_s=480.0))
