"""What HybridEP with a fixed budget needs of a machine, looked at without changing anything."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os

__all__ = [
    "CUBLASLT_NEEDED",
    "FUSED_GROUPED_MLP",
    "cublaslt_version",
    "deep_ep_state",
    "hybridep_is_missing",
    "version_text",
    "wants_fused_grouped_mlp",
]

FUSED_GROUPED_MLP = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
"""Megatron takes the grouped MLP as one operation only with this, on any GPU."""

CUBLASLT_NEEDED = 130801
"""13.8.1: the first that takes the token counts of a grouped product from the device rightly."""

_WAY_1 = (
    "Or dispatch with moe_token_dispatcher_type=alltoall, moe_expert_capacity_factor and "
    "moe_pad_expert_input_to_capacity=True, which needs none of it."
)


def hybridep_is_missing() -> str | None:
    """What is to be installed or set before HybridEP can be captured, or None."""
    found = [text for text in (_deep_ep(), _cublaslt(), _environment()) if text]
    if not found:
        return None
    listed = "\n  - ".join(found)
    return f"Dispatch with HybridEP cannot be captured here:\n  - {listed}\n{_WAY_1}"


def deep_ep_state() -> tuple[str | None, bool]:
    """The version of DeepEP (None: not installed), and whether it has HybridEP."""
    if importlib.util.find_spec("deep_ep") is None:
        return None, False
    version = "unknown version"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("deep_ep")
    return version, importlib.util.find_spec("hybrid_ep_cpp") is not None


def cublaslt_version() -> int | None:
    """Of the cuBLASLt that this process has or would load, as 130801 for 13.8.1; None: none."""
    for library in ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"):
        with contextlib.suppress(OSError, AttributeError):
            get_version = ctypes.CDLL(library).cublasLtGetVersion
            get_version.restype = ctypes.c_size_t
            return int(get_version())
    return None


def version_text(number: int) -> str:
    """``130801`` as 13.8.1."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def wants_fused_grouped_mlp() -> bool:
    """Whether the variable that Megatron asks for is set."""
    try:
        return int(os.environ.get(FUSED_GROUPED_MLP, "0")) > 0
    except ValueError:
        return False


def _deep_ep() -> str | None:
    version, has_hybrid_ep = deep_ep_state()
    if has_hybrid_ep:
        return None
    how = "build the branch hybrid-ep of DeepEP for this machine"
    if version is None:
        return f"deep_ep is not installed; {how}"
    return f"deep_ep ({version}) has no HybridEP; {how}"


def _cublaslt() -> str | None:
    number = cublaslt_version()
    needed = version_text(CUBLASLT_NEEDED)
    if number is None:
        return f"cuBLASLt {needed} or newer was not found"
    if number < CUBLASLT_NEEDED:
        return (
            f"cuBLASLt {version_text(number)} lets token counts go through the host; load "
            f"{needed} or newer (a newer nvidia-cublas, or LD_PRELOAD of its two libraries)"
        )
    return None


def _environment() -> str | None:
    if wants_fused_grouped_mlp():
        return None
    return (
        f"{FUSED_GROUPED_MLP} is not set to 1; Megatron takes use_transformer_engine_op_fuser for "
        "experts only with it, on Hopper too"
    )
