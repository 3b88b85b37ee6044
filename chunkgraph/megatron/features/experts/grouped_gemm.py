"""Matrix products of experts on sorted rows whose number per expert only the device knows.

Rows come in a buffer of fixed size: first the first expert's, then the second expert's, and so on.
Rows after the last expert's are not computed, and their results are undefined. ``ends`` contains
the end of each expert's rows. The host of a GPU reads nothing, so graphs can contain the products.

On a GPU `device_gemms` computes them. On a CPU, operators with the same contract loop over the
experts, with the same bits as Megatron's experts; the recorder replays them like torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import library

from chunkgraph.engine.capture.accumulate import add_together
from chunkgraph.megatron.features.experts.device_gemms import TorchGemm, native_gemm
from chunkgraph.megatron.features.experts.dropless_rows import DeviceSplits

__all__ = ["GroupedGemm", "add_biases", "choose_gemm", "grouped_linear"]

_GPUS = (9, 10)
"""Major compute capabilities. On other GPUs torch loops over experts and reads ends on the host."""


class GroupedGemm(Protocol):
    """Multiplies rows [num_rows, in] by weights [out, in], one for each expert."""

    def rows(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], splits: DeviceSplits
    ) -> torch.Tensor:
        """Return the rows times their expert's weight: [num_rows, out]."""

    def row_grads(
        self, grads: torch.Tensor, weights: Sequence[torch.Tensor], splits: DeviceSplits
    ) -> torch.Tensor:
        """Return the gradients of the rows: [num_rows, in]."""

    def weight_grads(
        self, grads: torch.Tensor, rows: torch.Tensor, splits: DeviceSplits
    ) -> Sequence[torch.Tensor]:
        """Return the gradient of each weight, zeros without rows: [out, in] each."""

    def sums(self, grads: torch.Tensor, splits: DeviceSplits) -> torch.Tensor:
        """Return the sum of each expert's rows: [experts, out]."""


def _loop(ends: torch.Tensor, run: Callable[[int, int, int], None]) -> None:
    """Call ``run`` with the index, begin and end of every expert; only for CPU tensors."""
    begin = 0
    for index, end in enumerate(ends.tolist()):
        run(index, begin, end)
        begin = end


def _unknown(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return memory filled with NaN, like a GPU's undefined rows."""
    return torch.full(shape, float("nan"), dtype=like.dtype)


def _cpu_product(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor, is_grad: bool
) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        out = _unknown((rows.shape[0], weights[0].shape[1 if is_grad else 0]), rows)

        def multiply(index: int, begin: int, end: int) -> None:
            weight = weights[index] if is_grad else weights[index].t()
            out[begin:end] = torch.matmul(rows[begin:end], weight)

        _loop(ends, multiply)
        return out


def _cpu_weight_grads(
    grads: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor
) -> list[torch.Tensor]:
    with torch._C.DisableTorchFunction():
        products: list[torch.Tensor] = []
        _loop(
            ends,
            lambda _, begin, end: products.append(
                torch.matmul(grads[begin:end].t(), rows[begin:end]),
            ),
        )
        return products


def _cpu_sums(grads: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        sums: list[torch.Tensor] = []
        _loop(ends, lambda _, begin, end: sums.append(grads[begin:end].sum(0)))
        return torch.stack(sums)


_LIBRARY = library.Library("chunkgraph", "FRAGMENT")
_LIBRARY.define("grouped_rows(Tensor rows, Tensor[] weights, Tensor ends, bool is_grad) -> Tensor")
_LIBRARY.define("grouped_weight_grads(Tensor grads, Tensor rows, Tensor ends) -> Tensor[]")
_LIBRARY.define("grouped_sums(Tensor grads, Tensor ends) -> Tensor")
_LIBRARY.impl("grouped_rows", _cpu_product, "CPU")
_LIBRARY.impl("grouped_weight_grads", _cpu_weight_grads, "CPU")
_LIBRARY.impl("grouped_sums", _cpu_sums, "CPU")
_operators: Any = torch.ops.chunkgraph


class LoopGemm:
    """Runs a loop over experts in one operator of the CPU."""

    def rows(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], splits: DeviceSplits
    ) -> torch.Tensor:
        """See `GroupedGemm`."""
        result: torch.Tensor = _operators.grouped_rows(rows, list(weights), splits.ends, False)
        return result

    def row_grads(
        self, grads: torch.Tensor, weights: Sequence[torch.Tensor], splits: DeviceSplits
    ) -> torch.Tensor:
        """See `GroupedGemm`."""
        result: torch.Tensor = _operators.grouped_rows(grads, list(weights), splits.ends, True)
        return result

    def weight_grads(
        self, grads: torch.Tensor, rows: torch.Tensor, splits: DeviceSplits
    ) -> Sequence[torch.Tensor]:
        """See `GroupedGemm`."""
        result: list[torch.Tensor] = _operators.grouped_weight_grads(grads, rows, splits.ends)
        return result

    def sums(self, grads: torch.Tensor, splits: DeviceSplits) -> torch.Tensor:
        """See `GroupedGemm`."""
        result: torch.Tensor = _operators.grouped_sums(grads, splits.ends)
        return result


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
    if device.type == "cpu":
        return LoopGemm(), "a loop over experts in one operator (CPU)"
    native, text = native_gemm(dtype, recipe)
    if native is not None or recipe is not None:
        return native, text
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
        return None, f"weights of {dtype}: torch._grouped_mm multiplies bfloat16, and {text}"
    return TorchGemm(), f"torch._grouped_mm (torch {torch.__version__})"


@dataclass(frozen=True)
class _Product:
    """State that the backward of a product needs in addition to saved tensors."""

    gemm: GroupedGemm
    splits: DeviceSplits


class _GroupedLinear(torch.autograd.Function):
    """Multiplies rows by the weight of their expert."""

    @staticmethod
    def forward(
        ctx: Any,
        product: _Product,
        rows: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(rows, *weights)
        return product.gemm.rows(rows, weights, product.splits)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        gemm, splits, grads = ctx.product.gemm, ctx.product.splits, grads.contiguous()
        of_rows = gemm.row_grads(grads, weights, splits) if ctx.needs_input_grad[1] else None
        needs_grad = ctx.needs_input_grad[2:]
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        if any(needs_grad):
            by_expert = gemm.weight_grads(grads, rows, splits)
            add_together(by_expert[0])
            of_weights = [
                g if is_needed else None for g, is_needed in zip(by_expert, needs_grad, strict=True)
            ]
        return None, of_rows, *of_weights


class _BiasRows(torch.autograd.Function):
    """Selects the bias of each row's expert."""

    @staticmethod
    def forward(
        ctx: Any,
        product: _Product,
        experts: torch.Tensor,
        *biases: torch.Tensor,
    ) -> torch.Tensor:
        ctx.product = product
        return torch.stack(biases).index_select(0, experts)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums = ctx.product.gemm.sums(grads.contiguous(), ctx.product.splits)
        return None, None, *sums.unbind(0)


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
        weights: Weights, each of shape [out, in].

    Returns:
        Tensor of shape [num_rows, out]; rows after the last end are undefined.
    """
    result: torch.Tensor = _GroupedLinear.apply(_Product(gemm, splits), rows, *weights)
    return result


def add_biases(
    gemm: GroupedGemm, num_rows: int, splits: DeviceSplits, biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the bias of each row's expert, shape [num_rows, out], with gradients.

    Args:
        gemm: See `choose_gemm`.
        num_rows: Rows of the buffer.
        splits: Rows of each expert.
        biases: Biases, each of shape [out].
    """
    ends = splits.ends
    places = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    experts = torch.searchsorted(ends, places, right=True).clamp(max=len(biases) - 1)
    result: torch.Tensor = _BiasRows.apply(_Product(gemm, splits), experts, *biases)
    return result
