"""Split backwards equal whole eager ones to the last bit, and run every operator once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from split_models import (
    MODELS,
    as_split,
    assert_equal,
    check_step,
    gradients,
    inputs_of,
    pair,
)
from toys import Operators

from chunkgraph.graphs import GraphBackend, RecorderBackend


# A reentrant checkpoint computes no gradients where its inputs take none.
@pytest.mark.parametrize(
    ("name", "requires_grad"),
    [(name, True) for name in MODELS] + [(n, False) for n in MODELS if "reentrant" not in n],
)
def test_halves_have_the_bits_of_whole_backwards(
    backend: GraphBackend, name: str, requires_grad: bool
) -> None:
    eager, module = pair(name, backend.device)
    graphs = as_split(module, backend)
    for lag in (0, 2, 1):
        inputs = inputs_of(backend.device, 5, requires_grad=requires_grad)
        check_step(graphs, eager, inputs, lag)
        assert_equal(gradients(module), gradients(eager))
    assert graphs.counters.weight_replays == graphs.counters.backward_replays == 10


HEAVY = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::native_layer_norm_backward",
    "aten::_fused_rms_norm_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::gelu_backward",
    "aten::sum.dim_IntList",
}


def test_no_operator_runs_twice() -> None:
    backend = RecorderBackend()
    eager, module = pair("layers", backend.device)
    x = inputs_of(backend.device, 1)[0]
    y = eager(x)
    with Operators() as whole:
        y.backward(torch.ones_like(y))
    graphs = as_split(module, backend, num_slots=1)
    logs: dict[str, Counter[str]] = {}
    capture = backend.capture

    def counted(label: str, *args: Any, **keywords: Any) -> Any:
        return _Counting(capture(label, *args, **keywords), label, logs)

    backend.capture = counted  # type: ignore[method-assign, assignment]
    graphs.capture([x])
    inputs = logs["rank 0 chunk 0 slot 0 input gradient"]
    weights = logs["rank 0 chunk 0 slot 0 weight gradient"]
    heavy = {name: n for name, n in Counter(whole.names).items() if name in HEAVY}
    assert {name: inputs[name] + weights[name] for name in heavy} == heavy
    assert inputs["aten::mm"] == weights["aten::mm"] == 8
    assert weights.keys() & HEAVY == {"aten::mm", "aten::sum.dim_IntList"}


class _Counting:
    """A capture that counts its operators."""

    def __init__(self, inner: Any, label: str, logs: dict[str, Counter[str]]) -> None:
        self._inner, self._label, self._logs = inner, label, logs
        self._operators = Operators()

    def __enter__(self) -> Any:
        graph = self._inner.__enter__()
        self._operators.__enter__()
        return graph

    def __exit__(self, *error: object) -> Any:
        self._operators.__exit__(*error)
        self._logs[self._label] = Counter(self._operators.names)
        return self._inner.__exit__(*error)
