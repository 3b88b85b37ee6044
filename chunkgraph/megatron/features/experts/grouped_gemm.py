"""Matrix products of experts on sorted rows whose number per expert only the device knows.

Rows come in a buffer of fixed size: first the first expert's, then the second expert's, and so on.
Rows after the last expert's are not computed, and their results are undefined. The host of a GPU
reads no number of rows, so graphs can contain the products.

Transformer Engine's product is the faster one at every size in `benchmarks/README.md`, and takes
float16 and FP8 as well, but needs a newer cuBLASLt than torch brings. torch's needs nothing; on a
CPU it has the bits of Megatron's experts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import library

from chunkgraph.engine.capture.accumulate import add_together
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import private_names, versions
from chunkgraph.megatron.features.experts.dropless_rows import DeviceSplits
from chunkgraph.memory.sleeping import memory_holding

CUBLASLT_NEEDED = 130801
"""13.8.1: the first version that correctly reads a grouped product's counts on the device."""
FP8_MULTIPLES = {"tensorwise": 16, "blockwise": 128}
"""Divisor of the rows of each expert that the kernels of an FP8 recipe need.

Transformer Engine has no such kernels for other recipes.
"""
_FP8 = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
_GEMM = "transformer_engine.pytorch.cpp_extensions"
_STORAGE = "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage"
_LINEAR = "transformer_engine.pytorch.module.grouped_linear"
_RECIPES = "transformer_engine.common.recipe"
_GPUS = (9, 10)
"""Major compute capabilities. On other GPUs torch loops over experts and reads ends on the host."""
_SUMMED = 8
"""Columns of the matrix of ones that sums rows: the fewest that are aligned."""
_ALIGNMENT_BYTES = 16


class GroupedGemm:
    """Multiplies rows [num_rows, in] by weights [out, in], one for each expert.

    It runs `torch._grouped_mm`, whose offsets stay on the device.
    """

    def rows(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], splits: DeviceSplits
    ) -> torch.Tensor:
        """Return the rows times their expert's weight: [num_rows, out]."""
        return torch._grouped_mm(rows, as_one(weights).transpose(-2, -1), offs=splits.ends)

    def row_grads(
        self, grads: torch.Tensor, weights: Sequence[torch.Tensor], splits: DeviceSplits
    ) -> torch.Tensor:
        """Return the gradients of the rows: [num_rows, in]."""
        return torch._grouped_mm(grads, as_one(weights), offs=splits.ends)

    def outer(self, grads: torch.Tensor, rows: torch.Tensor, splits: DeviceSplits) -> torch.Tensor:
        """Return each expert's gradients times its rows, zeros without rows: [experts, out, in]."""
        out = self._outer(grads, rows, splits)
        torch.ops.chunkgraph.zero_empty(out, splits.ends)
        return out

    def sums(self, grads: torch.Tensor, splits: DeviceSplits) -> torch.Tensor:
        """Return the sum of each expert's rows: [experts, out]."""
        if not grads.is_cuda:  # in a loop, with the bits of a plain sum
            result: torch.Tensor = torch.ops.chunkgraph.grouped_sums(grads, splits.ends)
            return result
        ones = torch.ones(grads.shape[0], _SUMMED, dtype=grads.dtype, device=grads.device)
        return self.outer(grads, ones, splits)[:, :, 0]

    def _outer(self, grads: torch.Tensor, rows: torch.Tensor, splits: DeviceSplits) -> torch.Tensor:
        return torch._grouped_mm(grads.t(), rows, offs=splits.ends)


def _loop_sums(grads: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        bounds = [0, *ends.tolist()]
        return torch.stack([grads[a:z].sum(0) for a, z in itertools.pairwise(bounds)])


class NativeGemm(GroupedGemm):
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

    def _outer(self, grads: torch.Tensor, rows: torch.Tensor, splits: DeviceSplits) -> torch.Tensor:
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


def cublaslt_version() -> int | None:
    """Return the version of this process's cuBLASLt, as 130801 for 13.8.1; None without one."""
    for name in ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"):
        with contextlib.suppress(OSError, AttributeError):
            get_version = ctypes.CDLL(name).cublasLtGetVersion
            get_version.restype = ctypes.c_size_t
            return int(get_version())
    return None


def version_text(number: int) -> str:
    """Format ``130801`` as 13.8.1."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def native_need(dtype: torch.dtype, recipe: str | None = None) -> str | None:
    """Describe what Transformer Engine's grouped GEMM lacks on this machine; None if nothing.

    Args:
        dtype: Type of the weights.
        recipe: FP8 recipe of the experts, a key of `FP8_MULTIPLES`; None without FP8.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    number, needed = cublaslt_version(), version_text(CUBLASLT_NEEDED)
    if number is None:
        return f"cuBLASLt {needed} or newer was not found"
    if number < CUBLASLT_NEEDED:
        return (
            f"cuBLASLt {version_text(number)} moves token counts through the host; load "
            f"{needed} or newer (a newer nvidia-cublas, or LD_PRELOAD of its two libraries)"
        )
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


def choose_gemm(
    device: torch.device, dtype: torch.dtype, recipe: str | None = None
) -> tuple[GroupedGemm | None, str]:
    """Return the grouped product for captured experts on ``device``, and its name.

    If there is none, return None and the reason.

    Args:
        device: Device of the experts.
        dtype: Type of their weights.
        recipe: Their FP8 recipe; None without FP8.
    """
    name = f"torch._grouped_mm (torch {torch.__version__})"
    if device.type == "cpu":
        if not hasattr(torch.nn.functional, "grouped_mm"):
            return None, f"{name} does not run on a CPU; install 2.10 or newer"
        return GroupedGemm(), name
    if (need := native_need(dtype, recipe)) is None:
        version = version_text(cublaslt_version() or 0)
        return NativeGemm(), f"Transformer Engine's grouped GEMM (cuBLASLt {version})"
    if recipe is not None:
        return None, need
    if not hasattr(torch, "_grouped_mm"):
        return None, f"torch {torch.__version__} has no _grouped_mm; install 2.8 or newer"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in _GPUS:
        number = ".".join(map(str, capability))
        known = " or ".join(f"{major}.x" for major in _GPUS)
        return None, (
            f"a GPU of compute capability {number}: torch._grouped_mm reads sizes on the host "
            f"there, and on the device with {known}"
        )
    if dtype is not torch.bfloat16:
        return None, f"weights of {dtype}: torch._grouped_mm multiplies bfloat16, and {need}"
    return GroupedGemm(), name


class _GroupedLinear(torch.autograd.Function):
    """Multiplies rows by the weight of their expert."""

    @staticmethod
    def forward(
        ctx: Any,
        gemm: GroupedGemm,
        splits: DeviceSplits,
        rows: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gemm, ctx.splits = gemm, splits
        ctx.save_for_backward(rows, *weights)
        return gemm.rows(rows, weights, splits)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        gemm, splits, grads = ctx.gemm, ctx.splits, grads.contiguous()
        of_rows = gemm.row_grads(grads, weights, splits) if ctx.needs_input_grad[2] else None
        needs_grad = ctx.needs_input_grad[3:]
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        if any(needs_grad):
            by_expert = gemm.outer(grads, rows, splits).unbind(0)
            add_together(by_expert[0])
            of_weights = [
                g if is_needed else None for g, is_needed in zip(by_expert, needs_grad, strict=True)
            ]
        return None, None, of_rows, *of_weights


class _BiasRows(torch.autograd.Function):
    """Selects the bias of each row's expert."""

    @staticmethod
    def forward(
        ctx: Any,
        gemm: GroupedGemm,
        splits: DeviceSplits,
        experts: torch.Tensor,
        *biases: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gemm, ctx.splits = gemm, splits
        return torch.stack(biases).index_select(0, experts)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums = ctx.gemm.sums(grads.contiguous(), ctx.splits)
        return None, None, None, *sums.unbind(0)


def grouped_linear(
    gemm: GroupedGemm,
    rows: torch.Tensor,
    splits: DeviceSplits,
    weights: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Multiply rows by the weight of their expert, with gradients.

    Args:
        gemm: See `choose_gemm`.
        rows: Rows sorted by expert, shape [num_rows, in].
        splits: Rows of each expert.
        weights: Weights, each of shape [out, in], first expert first.

    Returns:
        Tensor of shape [num_rows, out]; rows after the last end are undefined.
    """
    in_order = weights[::-1] if splits.are_reversed else weights
    result: torch.Tensor = _GroupedLinear.apply(gemm, splits, rows, *in_order)
    return result


def add_biases(
    gemm: GroupedGemm, num_rows: int, splits: DeviceSplits, biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the bias of each row's expert, shape [num_rows, out], with gradients.

    Args:
        gemm: See `choose_gemm`.
        num_rows: Rows of the buffer.
        splits: Rows of each expert.
        biases: Biases, each of shape [out], first expert first.
    """
    ends = splits.ends
    places = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    experts = torch.searchsorted(ends, places, right=True).clamp(max=len(biases) - 1)
    in_order = biases[::-1] if splits.are_reversed else biases
    result: torch.Tensor = _BiasRows.apply(gemm, splits, experts, *in_order)
    return result


def as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return weights [out, in] as one tensor [experts, out, in].

    The result is a view if the weights have even distances in one storage, as after `lay_together`,
    otherwise a copy.
    """
    first = weights[0].detach()
    step_bytes = _even_step_bytes(weights)
    if step_bytes is None:
        return torch.stack([weight.detach() for weight in weights])
    shape = (len(weights), *first.shape)
    return first.as_strided(shape, (step_bytes // first.element_size(), *first.stride()))


def lie_reversed(weights: Sequence[torch.Tensor]) -> bool:
    """Return whether `as_one` copies weights in their order, but not in reverse order.

    Megatron's buffers hold the last parameter first.
    """
    return _even_step_bytes(weights) is None and _even_step_bytes(weights[::-1]) is not None


def lay_together(weights: Sequence[torch.nn.Parameter]) -> None:
    """Move weights into one storage, so that `as_one` copies nothing.

    The parameters stay the same objects, and sleep in the same memory. Weights that share a storage
    with other tensors, such as a buffer of Megatron's optimizer, are not moved.
    """
    is_shared = any(w.untyped_storage().nbytes() != w.numel() * w.element_size() for w in weights)
    if is_shared or _even_step_bytes(weights) is not None:
        return
    with memory_holding(weights[0]):
        together = torch.stack([weight.detach() for weight in weights])
    for weight, place in zip(weights, together, strict=True):
        weight.data = place


def _zero_empty(grads: torch.Tensor, ends: torch.Tensor) -> None:
    """Write zeros to ``grads`` [experts, out, in] of experts without rows.

    A grouped product does not write the gradients of these experts. This is one operator of torch
    on each device: a split backward sees that it reads and writes weight gradients.
    """
    if grads.is_cuda and importlib.util.find_spec("triton") is not None:
        kernel = importlib.import_module("chunkgraph.megatron.features.experts.empty_kernel")
        kernel.zero_empty(grads, ends)
        return
    begins = torch.nn.functional.pad(ends[:-1], (1, 0))
    grads.masked_fill_((ends == begins)[:, None, None], 0)


_LIBRARY = library.Library("chunkgraph", "FRAGMENT")
_LIBRARY.define("grouped_sums(Tensor grads, Tensor ends) -> Tensor")
_LIBRARY.impl("grouped_sums", _loop_sums, "CPU")
_LIBRARY.define("zero_empty(Tensor(a!) grads, Tensor ends) -> ()")
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("zero_empty", _zero_empty, _device)


def _even_step_bytes(weights: Sequence[torch.Tensor]) -> int | None:
    """Return the distance between consecutive weights; None if it is uneven."""
    first = weights[0]
    num_bytes = first.numel() * first.element_size()
    if not all(w.is_contiguous() and w.shape == first.shape for w in weights):
        return None
    if len(weights) == 1:
        return num_bytes
    start, storage = first.data_ptr(), first.untyped_storage()
    step_bytes = weights[1].data_ptr() - start
    is_even = all(w.data_ptr() == start + i * step_bytes for i, w in enumerate(weights))
    lies_inside = start + (len(weights) - 1) * step_bytes + num_bytes <= (
        storage.data_ptr() + storage.nbytes()
    )
    if is_even and lies_inside and step_bytes >= num_bytes and not step_bytes % _ALIGNMENT_BYTES:
        return step_bytes
    return None
