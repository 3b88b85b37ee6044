"""Documents of one row know nothing of each other, nor of NaN behind them, in replays.

On a CPU the attention is the tests' own, which clears rows without a token, and Mamba's kernels are
stood in for; on a GPU they are those of Transformer Engine and of mamba-ssm and causal-conv1d.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

_CHANGED = 1
# Of Mamba's documents that begin in one block of rows: what may move of another, as a share of the
# largest of the document's losses and of a parameter's gradient. Products are in TensorFloat-32
# (10 bits) for float32; bfloat16 has 7. Gradients that hear of another document move by more.
_ROUNDED_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}
_ROUNDED_GRADIENT = {"float32": 2e-3, "bfloat16": 3e-2}
_HEARD = 5e-2


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "support"))


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


def test_on_a_cpu(
    run_cases: Callable[..., Any],
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
) -> None:
    made = importlib.import_module("packed_cases")
    text = write_documents(range(2, 23))
    probe = {"probe": "isolation", "lengths": [7, 9, 4, 8], "changed": _CHANGED}
    kinds = ["attention", "grouped", "hybrid", *(["latent"] if made.HAS_LATENT else [])]
    cases = {
        kind: {**made.cpu_case(text, make_config, kind, [1], capture={"scope": "chunk"}), **probe}
        for kind in kinds
    }
    # Each document's rows are a multiple of eight, with padding between them.
    apart = {"max_packed_tokens": 64, "pad_seq_to_mult": 8}
    case = made.cpu_case(text, make_config, "hybrid", [1], packing=apart)
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
    made = importlib.import_module("packed_cases")
    text = write_documents(range(9, 110), 200)
    probe = {"probe": "isolation", "lengths": [70, 61, 9, 80], "changed": _CHANGED}
    cases = {
        f"{kind}_{scope}": {
            **made.gpu_case(text, make_config, kind, [1], capture={"scope": scope}),
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
    """A case of a model of bfloat16 with Mamba and attention, on Mamba's own kernels."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
    if missing := importlib.import_module("mamba_needs").missing_kernels():
        pytest.skip(missing)
    monkeypatch.setenv("MAMBA_DETERMINISTIC", "1")
    made = importlib.import_module("packed_cases")
    text = write_documents(range(9, 110), 200)

    def make(lengths: list[int], scope: str, **packing: int) -> dict[str, Any]:
        case = made.gpu_case(
            text, make_config, "hybrid", [1], capture={"scope": scope}, packing=packing
        )
        return {**case, "probe": "isolation", "lengths": lengths, "changed": _CHANGED}

    return make


@pytest.mark.gpu
def test_mamba_layers_whose_documents_share_no_block(
    run_cases: Callable[..., Any], hybrid: Callable[..., dict[str, Any]]
) -> None:
    """Nothing moves, not even by rounding: the kernels work on blocks of 128 rows."""
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
    """They move those behind them by rounding, since a kernel adds up decays over a block."""
    lengths = [70, 61, 9, 116, 50, 100]  # from the fifth on they are in the third block
    behind = [2, 3]

    def make(scope: str, dtype: str, *, one_state: bool = False) -> dict[str, Any]:
        case = hybrid(lengths, scope, max_packed_tokens=512)
        model = {**case["config"]["model"], "params_dtype": dtype}
        if dtype == "float32":  # which Transformer Engine has no attention of documents for
            model |= {"hybrid_layer_pattern": "M-M", "num_layers": 3}
        config = {**case["config"], "model": model}
        return {**case, "config": config, "one_state": one_state}

    cases = {
        f"{scope}_{dtype}": make(scope, dtype)
        for scope in ("block", "chunk")
        for dtype in ("bfloat16", "float32")
    }
    heard = {f"one_state_{d}": make("chunk", d, one_state=True) for d in ("bfloat16", "float32")}
    results = run_cases({**cases, **heard}, 1, timeout_s=280.0)
    for name in cases:
        result, dtype = results[name], name.partition("_")[2]
        for document in range(len(lengths)):
            losses, gradients = (result[f"moved_{w}"][document] for w in ("losses", "gradients"))
            if document == _CHANGED:
                assert min(losses, gradients) > _HEARD, name
            elif document in behind:
                assert losses <= _ROUNDED_LOSS[dtype], (name, document)
                assert gradients <= _ROUNDED_GRADIENT[dtype], (name, document)
            else:
                assert result["equal_losses"][document], (name, document)
                assert result["changed_gradients"][document] == 0, (name, document)
        assert result["poisoned"] == [], name
        assert result["replays"] == 4 + 2 * len(lengths), name
    # What these shares are when documents do hear of each other.
    for name in heard:
        assert all(results[name]["moved_gradients"][document] > _HEARD for document in behind), name
        assert not any(results[name]["equal_losses"][_CHANGED:]), name
