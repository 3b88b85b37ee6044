"""Transformer Engine's choice of attention, with a stand-in for the module that keeps it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from chunkgraph.errors import CaptureError
from chunkgraph.megatron.core.capturing import _MODULE, same_attention
from chunkgraph.megatron.features.model_state import ModelState

pytestmark = pytest.mark.megatron


@dataclass
class Arguments:
    max_seqlen_kv: int
    cuda_graph: bool = False


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Record the attention that ran last, as Transformer Engine does."""
    noted: dict[str, Any] = {"attention_params": None}
    monkeypatch.setitem(sys.modules, _MODULE, SimpleNamespace(_attention_backends=noted))

    def run(length: int, kind: str, *, captured: bool) -> None:
        noted.clear()
        noted.update(attention_params=Arguments(length, captured))
        noted.update({f"use_{k}_attention": k == kind for k in ("flash", "fused", "unfused")})

    return run


def test_another_attention_in_a_capture_is_refused(one_rank: Any, ran: Any) -> None:
    ran(96, "fused", captured=False)
    with (
        pytest.raises(CaptureError, match=r"ran fused attention.*takes unfused.*cuDNN up to 9\.15"),
        ModelState([]).around("capture"),
    ):
        ran(96, "unfused", captured=True)


@pytest.mark.parametrize(("length", "kind"), [(96, "fused"), (128, "unfused")])
def test_the_same_attention_and_one_of_other_arguments_are_not(
    ran: Any, length: int, kind: str
) -> None:
    """The last eager attention may belong to an evaluation step, for example."""
    ran(96, "fused", captured=False)
    with same_attention():
        ran(length, kind, captured=True)
