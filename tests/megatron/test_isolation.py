"""Documents of one row know nothing of each other, nor of NaN behind them, in replays.

On a CPU the attention is the tests' own, which clears rows without a token; on a GPU it is
Transformer Engine's.
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


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def _check(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        changes = [document == _CHANGED for document in range(len(result["equal_losses"]))]
        assert result["equal_losses"] == [not changed for changed in changes], name
        assert [number > 5 for number in result["changed_gradients"]] == changes, name
        assert [number for number in result["changed_gradients"] if number <= 5] == [0] * (
            len(changes) - 1
        ), name
        assert result["poisoned"] == [], name
        assert result["replays"] == 3 + 2 * len(changes), name


def test_on_a_cpu(
    run_cases: Callable[..., Any],
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
) -> None:
    made = importlib.import_module("packed_cases")
    text = write_documents(range(2, 23))
    probe = {"probe": "isolation", "lengths": [7, 9, 4, 8], "changed": _CHANGED}
    kinds = ["attention", "grouped", *(["latent"] if made.HAS_LATENT else [])]
    cases = {
        kind: {**made.cpu_case(text, make_config, kind, [1], capture={"scope": "chunk"}), **probe}
        for kind in kinds
    }
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
