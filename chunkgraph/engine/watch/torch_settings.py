"""Compare torch's own settings that choose kernels or dtypes; replays keep those of the capture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from chunkgraph.errors import ReplayMismatchError

__all__ = ["TorchSettings"]


def _settings() -> dict[str, Callable[[], Any]]:
    """Return the functions that read each setting, by the expression for it."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    matmul = cuda.matmul
    settings: dict[str, Callable[[], Any]] = {
        "torch.get_default_dtype()": torch.get_default_dtype,
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
        "torch.backends.cudnn.deterministic": lambda: cudnn.deterministic,
    }
    for dtype in ("fp16", "bf16"):
        name = f"allow_{dtype}_reduced_precision_reduction"
        settings[f"torch.backends.cuda.matmul.{name}"] = partial(getattr, matmul, name)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        settings[f"torch.backends.cuda.{name}_sdp_enabled()"] = getattr(cuda, f"{name}_sdp_enabled")
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:  # before torch 2.9
        settings["torch.get_float32_matmul_precision()"] = torch.get_float32_matmul_precision
        settings["torch.backends.cudnn.allow_tf32"] = lambda: cudnn.allow_tf32
        return settings
    for backend, op in (
        *(("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
        *(("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
    ):
        module = "cudnn" if backend == "cuda" and op != "matmul" else backend
        name = f"torch.backends.{module}.{op}.fp32_precision"
        settings[name] = partial(precision, backend, op)
    return settings


_SETTINGS = _settings()


class TorchSettings:
    """The settings at one time."""

    def __init__(self) -> None:
        self._captured = _now()

    def check(self, label: str) -> None:
        """Compare all settings.

        Args:
            label: Label of the chunk that is called.

        Raises:
            ReplayMismatchError: One has changed; the message names it.
        """
        now = _now()
        if now == self._captured:
            return
        changes = ", ".join(
            f"{name} (captured {captured}, now {present})"
            for name, captured, present in zip(_SETTINGS, self._captured, now, strict=True)
            if present != captured
        )
        raise ReplayMismatchError(
            f"{label}: {changes} was changed after capture; replays keep the captured kernels and "
            "dtypes. Enter such a context around whole steps rather than calls. To change the "
            "setting, release the graphs and capture again."
        )


def _now() -> list[Any]:
    return [read() for read in _SETTINGS.values()]
