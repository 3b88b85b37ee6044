"""Grouped products on a GPU, whose host reads no number of rows.

Transformer Engine's is the faster one at every size in `benchmarks/README.md`, and takes float16
and FP8 as well, but needs a newer cuBLASLt than torch brings. torch's needs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import private_names, versions
from chunkgraph.megatron.features.experts.dropless_rows import DeviceSplits
from chunkgraph.megatron.features.experts.grouped_weights import as_one, zero_empty

__all__ = [
    "CUBLASLT_NEEDED",
    "FP8_MULTIPLES",
    "NativeGemm",
    "TorchGemm",
    "cublaslt_need",
    "cublaslt_version",
    "native_gemm",
    "native_need",
    "version_text",
]

CUBLASLT_NEEDED = 130801
"""13.8.1: the first version that correctly reads a grouped product's counts on the device."""


def cublaslt_version() -> int | None:
    """Return the version of this process's cuBLASLt, as 130801 for 13.8.1; None without one."""
    for library in ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"):
        with contextlib.suppress(OSError, AttributeError):
            get_version = ctypes.CDLL(library).cublasLtGetVersion
            get_version.restype = ctypes.c_size_t
            return int(get_version())
    return None


def version_text(number: int) -> str:
    """Format ``130801`` as 13.8.1."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def cublaslt_need() -> str | None:
    """Describe the cuBLASLt to load for counts on the device; None if this process has it."""
    number = cublaslt_version()
    needed = version_text(CUBLASLT_NEEDED)
    if number is None:
        return f"cuBLASLt {needed} or newer was not found"
    if number < CUBLASLT_NEEDED:
        return (
            f"cuBLASLt {version_text(number)} moves token counts through the host; load "
            f"{needed} or newer (a newer nvidia-cublas, or LD_PRELOAD of its two libraries)"
        )
    return None


_SUMMED = 8
"""Columns of the matrix of ones that sums rows: the fewest that are aligned."""
_GEMM = "transformer_engine.pytorch.cpp_extensions"
_STORAGE = "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage"
_LINEAR = "transformer_engine.pytorch.module.grouped_linear"
_RECIPES = "transformer_engine.common.recipe"
_FP8 = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
FP8_MULTIPLES = {"tensorwise": 16, "blockwise": 128}
"""Divisor of the rows of each expert that the kernels of an FP8 recipe need.

Transformer Engine has no such kernels for other recipes.
"""


class _DeviceGemm(ABC):
    """Weight gradients and sums of rows, from one product of each expert's rows."""

    @abstractmethod
    def outer(self, grads: torch.Tensor, rows: torch.Tensor, splits: DeviceSplits) -> torch.Tensor:
        """Return the product of each expert's gradients and rows: [experts, out, in].

        Those of experts without rows may be undefined.
        """

    def weight_grads(
        self, grads: torch.Tensor, rows: torch.Tensor, splits: DeviceSplits
    ) -> Sequence[torch.Tensor]:
        """See `GroupedGemm`."""
        return zero_empty(self.outer(grads, rows, splits), splits.ends).unbind(0)

    def sums(self, grads: torch.Tensor, splits: DeviceSplits) -> torch.Tensor:
        """See `GroupedGemm`."""
        ones = torch.ones(grads.shape[0], _SUMMED, dtype=grads.dtype, device=grads.device)
        return zero_empty(self.outer(grads, ones, splits), splits.ends)[:, :, 0]


class TorchGemm(_DeviceGemm):
    """Runs `torch._grouped_mm`, whose offsets stay on the device."""

    def rows(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], splits: DeviceSplits
    ) -> torch.Tensor:
        """See `GroupedGemm`."""
        return torch._grouped_mm(rows, as_one(weights).transpose(-2, -1), offs=splits.ends)

    def row_grads(
        self, grads: torch.Tensor, weights: Sequence[torch.Tensor], splits: DeviceSplits
    ) -> torch.Tensor:
        """See `GroupedGemm`."""
        return torch._grouped_mm(grads, as_one(weights), offs=splits.ends)

    def outer(self, grads: torch.Tensor, rows: torch.Tensor, splits: DeviceSplits) -> torch.Tensor:
        """See the base class."""
        return torch._grouped_mm(grads.t(), rows, offs=splits.ends)


class NativeGemm(_DeviceGemm):
    """Runs Transformer Engine's grouped GEMM of cuBLASLt, whose counts stay on the device."""

    def __init__(self) -> None:
        (self._gemm,) = private_names(_GEMM, "general_grouped_gemm_for_grouped_tensor")
        (self._storage,) = private_names(_STORAGE, "GroupedTensorStorage")

    def rows(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], splits: DeviceSplits
    ) -> torch.Tensor:
        """See `GroupedGemm`."""
        return self._times(rows, weights, splits, weights[0].shape[0], layout="TN")

    def row_grads(
        self, grads: torch.Tensor, weights: Sequence[torch.Tensor], splits: DeviceSplits
    ) -> torch.Tensor:
        """See `GroupedGemm`."""
        return self._times(grads, weights, splits, weights[0].shape[1], layout="NN")

    def outer(self, grads: torch.Tensor, rows: torch.Tensor, splits: DeviceSplits) -> torch.Tensor:
        """See the base class."""
        out = rows.new_empty(len(splits.ends), grads.shape[1], rows.shape[1])
        operands = self._pack(rows, splits), self._pack(grads, splits)
        self._gemm(*operands, list(out.unbind(0)), layout="NT")
        return out

    def _times(
        self,
        rows: torch.Tensor,
        weights: Sequence[torch.Tensor],
        splits: DeviceSplits,
        width: int,
        *,
        layout: str,
    ) -> torch.Tensor:
        out = rows.new_empty(rows.shape[0], width)
        self._gemm(list(weights), self._pack(rows, splits), self._pack(out, splits), layout=layout)
        return out

    def _pack(self, rows: torch.Tensor, splits: DeviceSplits) -> Any:
        """Return ``rows`` as Transformer Engine's grouped tensor; nothing is copied."""
        rows = rows.contiguous()
        return self._storage(
            shape=tuple(rows.shape),
            dtype=rows.dtype,
            num_tensors=len(splits.ends),
            data=rows.view(-1),
            first_dims=splits.counts,
            tensor_offsets=splits.offsets(rows.shape[1]),
        )


def native_need(dtype: torch.dtype, recipe: str | None = None) -> str | None:
    """Describe what Transformer Engine's grouped GEMM lacks on this machine; None if nothing.

    Args:
        dtype: Type of the weights.
        recipe: FP8 recipe of the experts, a key of `FP8_MULTIPLES`; None without FP8.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    if (need := cublaslt_need()) is not None:
        return need
    try:
        NativeGemm()
        (is_supported,) = private_names(_LINEAR, "is_module_grouped_tensor_path_supported")
    except (ConfigError, ImportError, OSError):  # or a library that it loads
        version = versions().get("transformer_engine", "of this machine")
        return f"Transformer Engine {version} has no grouped GEMM with counts on the device"
    kind = None
    if recipe is not None:
        (kind,) = private_names(_RECIPES, _FP8[recipe])
    if is_supported(kind and kind(), dtype):
        return None
    return f"Transformer Engine's grouped GEMM does not multiply {recipe or dtype} on this GPU"


def native_gemm(dtype: torch.dtype, recipe: str | None = None) -> tuple[NativeGemm | None, str]:
    """Return Transformer Engine's grouped GEMM and its name, or None and the reason.

    Args:
        dtype: Type of the weights.
        recipe: FP8 recipe of the experts; None without FP8.
    """
    need = native_need(dtype, recipe)
    if need is not None:
        return None, need
    version = version_text(cublaslt_version() or 0)
    return NativeGemm(), f"Transformer Engine's grouped GEMM (cuBLASLt {version})"
