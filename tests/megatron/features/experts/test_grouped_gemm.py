"""Which grouped GEMM a machine gets, and why not Transformer Engine's."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.features.experts import grouped_gemm

_GPU = torch.device("cuda")


def _machine(
    monkeypatch: pytest.MonkeyPatch, *, version: int | None = 130802, supports: bool | None = True
) -> None:
    """Pretend a GPU with Transformer Engine; it lacks the GEMM if ``supports`` is None."""

    def names(_module: str, *wanted: str) -> tuple[Any, ...]:
        if supports is None:
            raise ConfigError("missing")
        return tuple((lambda *_: supports) for _ in wanted)

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: object() if name == "transformer_engine" else real(name),
    )
    monkeypatch.setattr(grouped_gemm, "cublaslt_version", lambda: version)
    monkeypatch.setattr(grouped_gemm, "private_names", names)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"version": None}, "cuBLASLt 13.8.1 or newer was not found"),
        ({"version": 130100}, "cuBLASLt 13.1.0 moves token counts through the host"),
        ({"supports": None}, "has no grouped GEMM with counts on the device"),
        ({"supports": False}, "does not multiply tensorwise on this GPU"),
    ],
)
def test_what_a_machine_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], message: str
) -> None:
    _machine(monkeypatch, **machine)
    need = grouped_gemm.native_need(torch.bfloat16, "tensorwise")
    assert need is not None
    assert message in need
    # bfloat16 has torch's, nothing else has.
    gemm, _ = grouped_gemm.choose_gemm(_GPU, torch.bfloat16)
    assert type(gemm) is grouped_gemm.GroupedGemm
    for dtype, recipe in ((torch.float16, None), (torch.bfloat16, "tensorwise")):
        gemm, text = grouped_gemm.choose_gemm(_GPU, dtype, recipe)
        assert gemm is None
        assert text


def test_transformer_engines_is_chosen_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch)
    for dtype, recipe in (
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, "blockwise"),
    ):
        gemm, text = grouped_gemm.choose_gemm(_GPU, dtype, recipe)
        assert isinstance(gemm, grouped_gemm.NativeGemm)
        assert text == "Transformer Engine's grouped GEMM (cuBLASLt 13.8.2)"
