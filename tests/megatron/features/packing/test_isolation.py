"""Documents in one row do not affect each other in replays, and NaN after them has no effect.

On a CPU the tests' own attention clears rows without a token, and a stand-in replaces Mamba's
kernels. On a GPU the kernels are those of Transformer Engine, mamba-ssm and causal-conv1d.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mamba_needs
import packed_cases
import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

_CHANGED = 1
# Limits for the rounding of Mamba's documents that share a block of rows, as a share of the
# document's largest loss and of a parameter's gradient. Products of float32 are in TensorFloat-32
# (10 bits); bfloat16 has 7. Gradients that depend on another document change by more.
_ROUNDED_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}
_ROUNDED_GRADIENT = {"float32": 2e-3, "bfloat16": 3e-2}
_DEPENDENT = 5e-2


def _check(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        changes = [document == _CHANGED for document in range(len(result["equal_losses"]))]
        assert result["equal_losses"] == [not changed for changed in changes], name
        assert [number > 5 for number in result["changed_gradients"]] == changes, name
        assert [number for number in result["changed_gradients"] if number <= 5] == [0] * (
            len(changes) - 1
        ), name
        assert result["poisoned"] == [], name
        assert result["replays"] == 4 + 2 * len(changes), name


@pytest.mark.slow
def test_on_a_cpu(
    run_cases: Callable[..., Any],
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
) -> None:
    text = write_documents(range(2, 23))
    probe = {"probe": "isolation", "lengths": [7, 9, 4, 8], "changed": _CHANGED}
    kinds = ["attention", "grouped", "hybrid", *(["latent"] if packed_cases.HAS_LATENT else [])]
    cases = {
        kind: {
            **packed_cases.cpu_case(text, make_config, kind, [1], capture={"scope": "chunk"}),
            **probe,
        }
        for kind in kinds
    }
    # Documents have multiples of eight rows, with padding between them.
    apart = {"max_packed_tokens": 64, "pad_seq_to_mult": 8}
    case = packed_cases.cpu_case(text, make_config, "hybrid", [1], packing=apart)
    cases["apart"] = {**case, **probe}
    _check(run_cases(cases, 1))


@pytest.mark.gpu
def test_on_a_gpu(
    run_cases: Callable[..., Any],
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
    text = write_documents(range(9, 110), 200)
    probe = {"probe": "isolation", "lengths": [70, 61, 9, 80], "changed": _CHANGED}
    cases = {
        f"{kind}_{scope}": {
            **packed_cases.gpu_case(text, make_config, kind, [1], capture={"scope": scope}),
            **probe,
        }
        for kind in ("attention", "unfused", "grouped", "latent")
        for scope in ("block", "chunk")
    }
    _check(run_cases(cases, 1, timeout_s=280.0))


@pytest.fixture
def hybrid(
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a case: bfloat16, Mamba and attention, Mamba's own kernels."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
    if missing := mamba_needs.missing_kernels():
        pytest.skip(missing)
    monkeypatch.setenv("MAMBA_DETERMINISTIC", "1")
    text = write_documents(range(9, 110), 200)

    def make(lengths: list[int], scope: str, **packing: int) -> dict[str, Any]:
        case = packed_cases.gpu_case(
            text, make_config, "hybrid", [1], capture={"scope": scope}, packing=packing
        )
        return {**case, "probe": "isolation", "lengths": lengths, "changed": _CHANGED}

    return make


@pytest.mark.gpu
def test_mamba_layers_whose_documents_share_no_block(
    run_cases: Callable[..., Any], hybrid: Callable[..., dict[str, Any]]
) -> None:
    """Nothing changes, not even by rounding: the kernels work on blocks of 128 rows."""
    lengths = [70, 200, 9, 130, 128]
    cases = {
        scope: hybrid(lengths, scope, max_packed_tokens=1024, pad_seq_to_mult=128)
        for scope in ("block", "chunk")
    }
    _check(run_cases(cases, 1, timeout_s=280.0))


@pytest.mark.gpu
def test_mamba_layers_whose_documents_share_a_block(
    run_cases: Callable[..., Any], hybrid: Callable[..., dict[str, Any]]
) -> None:
    """They change later documents by rounding, since a kernel adds up decays over a block."""
    lengths = [70, 61, 9, 116, 50, 100]  # the fifth and later ones are in the third block
    later = [2, 3]

    def make(scope: str, dtype: str, *, one_state: bool = False) -> dict[str, Any]:
        case = hybrid(lengths, scope, max_packed_tokens=512)
        model = {**case["config"]["model"], "params_dtype": dtype}
        if dtype == "float32":  # Transformer Engine has no attention of documents for it
            model |= {"hybrid_layer_pattern": "M-M", "num_layers": 3}
        config = {**case["config"], "model": model}
        return {**case, "config": config, "one_state": one_state}

    cases = {
        f"{scope}_{dtype}": make(scope, dtype)
        for scope in ("block", "chunk")
        for dtype in ("bfloat16", "float32")
    }
    dependent = {
        f"one_state_{d}": make("chunk", d, one_state=True) for d in ("bfloat16", "float32")
    }
    results = run_cases({**cases, **dependent}, 1, timeout_s=280.0)
    for name in cases:
        result, dtype = results[name], name.partition("_")[2]
        for document in range(len(lengths)):
            losses, gradients = (result[f"moved_{w}"][document] for w in ("losses", "gradients"))
            if document == _CHANGED:
                assert min(losses, gradients) > _DEPENDENT, name
            elif document in later:
                assert losses <= _ROUNDED_LOSS[dtype], (name, document)
                assert gradients <= _ROUNDED_GRADIENT[dtype], (name, document)
            else:
                assert result["equal_losses"][document], (name, document)
                assert result["changed_gradients"][document] == 0, (name, document)
        assert result["poisoned"] == [], name
        assert result["replays"] == 4 + 2 * len(lengths), name
    # The shares of documents that do depend on each other.
    for name in dependent:
        moved = results[name]["moved_gradients"]
        assert all(moved[document] > _DEPENDENT for document in later), name
        assert not any(results[name]["equal_losses"][_CHANGED:]), name
