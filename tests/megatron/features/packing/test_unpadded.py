"""Padding does not change the mathematics: graphs on padded rows against plain eager training.

Plain means unmodified Megatron, on rows without padding and with the documents' offsets. Both begin
every step from the same parameters. Matrix products have other numbers of rows, so kernels may add
up in another order: results are equal up to the limits of rounding below. Experts have room for all
tokens: these texts have many equal ones, and nothing defines which of them is dropped.
`test_packed_moe` has dropped tokens, in texts without equal ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mamba_needs
import packed_cases
import pytest
from training_needs import NEEDS_ENGINE

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

# Limits for a loss, and for a gradient relative to its norm. On a CPU in float32.
_CPU_LOSS, _CPU_GRADIENT = 1e-6, 1e-5
# bfloat16 has 8 bits: another rounding of a product differs by 2^-8; a gradient adds up many.
# Also, a token whose second and third expert score nearly the same may change its expert.
_GPU_LOSS, _GPU_GRADIENT, _GPU_GRADIENT_OF_EXPERTS = 2e-4, 2e-2, 2e-2


def _check(
    results: dict[str, dict[str, Any]],
    num_replays: int,
    *,
    loss: float,
    gradient: float,
    of_experts: float,
) -> None:
    for name, result in results.items():
        assert result["replays"] == num_replays, name
        assert max(result["padding"]) > 0, name
        worst = max(result["gradient_errors"].items(), key=lambda item: item[1])
        print(
            f"{name}: losses differ by {result['loss_error']:.2g} at most, "
            f"{result['num_equal_losses']} of {result['num_losses']} not at all, "
            f"gradients by {worst[1]:.2g} ({worst[0]})"
        )
        assert worst[1] <= (of_experts if "experts" in name else gradient), f"{name}: {worst}"
        assert result["loss_error"] <= loss, f"{name}: {result}"


@pytest.mark.slow
def test_on_a_cpu(
    run_cases: Callable[..., Any],
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
) -> None:
    text = write_documents(range(2, 23))
    kinds = [
        "attention",
        "grouped",
        "roomy_experts",
        *(["latent"] if packed_cases.HAS_LATENT else []),
    ]
    chunk = {"capture": {"scope": "chunk"}}
    cases = {k: packed_cases.cpu_case(text, make_config, k, [2, 1, 2], **chunk) for k in kinds}
    short = {"packing": {"max_packed_tokens": 24}}
    cases["hybrid"] = packed_cases.cpu_case(
        text, make_config, "hybrid", [2, 1, 2], **short, **chunk
    )
    # At most eight documents of three tokens or more, in eight rows each.
    apart = {"packing": {"max_packed_tokens": 80, "pad_seq_to_mult": 8}}
    for kind in ("attention", "roomy_experts", "hybrid"):
        case = packed_cases.cpu_case(text, make_config, kind, [2, 1, 2], **apart, **chunk)
        cases[f"apart_{kind}"] = {**case, "num_drawn": 24}
    results = run_cases({n: {**c, "probe": "unpadded"} for n, c in cases.items()}, 1)
    _check(results, 3, loss=_CPU_LOSS, gradient=_CPU_GRADIENT, of_experts=_CPU_GRADIENT)


@pytest.mark.gpu
@NEEDS_ENGINE
def test_on_a_gpu(
    run_cases: Callable[..., Any],
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAMBA_DETERMINISTIC", "1")
    text = write_documents(range(9, 110), 200)
    kinds = ["attention", "grouped", "unfused", "latent", "roomy_experts"]
    if not mamba_needs.missing_kernels():
        kinds.append("hybrid")
    chunk = {"capture": {"scope": "chunk"}}
    cases = {
        k: packed_cases.gpu_case(text, make_config, k, [2, 3, 1, 2, 4], **chunk) for k in kinds
    }
    # At most ten documents of ten tokens or more, in 64 rows each.
    apart = {"packing": {"max_packed_tokens": 768, "pad_seq_to_mult": 64}}
    for kind in (k for k in kinds if k not in ("unfused", "latent")):
        case = packed_cases.gpu_case(text, make_config, kind, [2, 3, 1, 2, 4], **apart, **chunk)
        cases[f"apart_{kind}"] = {**case, "num_drawn": 110}
    probes = {n: {**c, "probe": "unpadded"} for n, c in cases.items()}
    _check(
        run_cases(probes, 1, timeout_s=280.0),
        10,
        loss=_GPU_LOSS,
        gradient=_GPU_GRADIENT,
        of_experts=_GPU_GRADIENT_OF_EXPERTS,
    )
