"""Settings of torch that choose kernels or dtypes are equal to those of the capture, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend


def _set_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def _set_precision() -> None:
    torch.set_float32_matmul_precision("high")


def _set_deterministic() -> None:
    torch.use_deterministic_algorithms(True)


def _set_cudnn() -> None:
    torch.backends.cudnn.deterministic = True


def _set_reduction() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _set_attention() -> None:
    torch.backends.cuda.enable_math_sdp(False)


_CHANGES = {
    r"get_default_dtype\(\) \(captured torch\.float32, now torch\.float64\)": _set_default_dtype,
    "matmul": _set_precision,
    r"are_deterministic_algorithms_enabled\(\) \(captured False, now True\)": _set_deterministic,
    r"cudnn\.deterministic \(captured False, now True\)": _set_cudnn,
    r"matmul\.allow_bf16_reduced_precision_reduction": _set_reduction,
    r"math_sdp_enabled\(\) \(captured True, now False\)": _set_attention,
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore all settings that a test of this file changes."""
    precision = torch.get_float32_matmul_precision()
    reduction = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduction
    torch.backends.cuda.enable_math_sdp(True)


def _captured(backend: GraphBackend) -> tuple[ChunkGraphs, Callable[..., None]]:
    graphs = ChunkGraphs([nn.Linear(4, 4).to(backend.device)], [2], backend=backend)
    x = torch.randn(3, 4, device=backend.device)

    def step(around: Callable[[], Any] = nullcontext) -> None:
        with graphs.step(2):
            for _ in range(2):
                with around():
                    out = graphs.callables[0](x)
                out.sum().backward()

    return graphs, step


@pytest.mark.parametrize(
    ("name", "change"), _CHANGES.items(), ids=lambda v: getattr(v, "__name__", "")
)
def test_a_changed_setting_is_refused_by_name(
    backend: GraphBackend, name: str, change: Callable[[], None]
) -> None:
    graphs, step = _captured(backend)
    for _ in range(3):
        step()
    assert graphs.counters.replayed_steps == 2
    change()
    with pytest.raises(ReplayMismatchError, match=f"{name}.* was changed after capture"):
        step()
    graphs.release()
    for _ in range(2):
        step()
    assert graphs.counters.replayed_steps == 3


def test_a_context_around_calls_alone_is_refused(backend: GraphBackend) -> None:
    """The capture, at the begin of a step, does not run in it."""
    _, step = _captured(backend)
    step(lambda: sdpa_kernel(SDPBackend.MATH))
    with pytest.raises(ReplayMismatchError, match=r"flash_sdp_enabled\(\).*around whole steps"):
        step(lambda: sdpa_kernel(SDPBackend.MATH))


def test_a_context_around_steps_is_captured(backend: GraphBackend) -> None:
    graphs, step = _captured(backend)
    for _ in range(3):
        with sdpa_kernel(SDPBackend.MATH):
            step()
    assert graphs.counters.replayed_steps == 2
