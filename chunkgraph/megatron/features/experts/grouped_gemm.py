"""Products of experts on rows sorted by expert, of which only the device knows how many each has.

Rows come in a buffer of fixed size: first those of the first expert, then those of the second, and
so on; rows after the last expert's are not computed, and their results hold anything. ``ends``
says where each expert's rows end. Nothing is read on the host of a GPU, so that a graph holds it.

On a GPU `torch._grouped_mm` computes them. On a CPU operators of the same contract run a loop over
experts, with the bits of Megatron's own experts; the recorder replays them like torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chunkgraph.megatron.features.experts.grouped_weights import as_one, zero_empty

__all__ = ["GroupedGemm", "add_biases", "choose_gemm", "grouped_linear"]

_GPUS = (9, 10)
"""Compute capabilities; others get a loop over experts from torch that reads ends on the host."""
_SUMMED = 8
"""Columns of the ones that sum rows: the fewest that are aligned."""


class GroupedGemm(Protocol):
    """Multiplies rows [num_rows, in] by weights [out, in], one for each expert."""

    def rows(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor
    ) -> torch.Tensor:
        """Return the rows times their expert's weight: [num_rows, out]."""

    def row_grads(
        self, grads: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradients of the rows: [num_rows, in]."""

    def weight_grads(
        self, grads: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Return the gradient of each weight, zeros without rows: [out, in] each."""

    def sums(self, grads: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the sum of each expert's rows: [experts, out]."""


def _loop(ends: torch.Tensor, run: Callable[[int, int, int], None]) -> None:
    """Call ``run`` with the index, begin and end of every expert; for tensors of a CPU alone."""
    begin = 0
    for index, end in enumerate(ends.tolist()):
        run(index, begin, end)
        begin = end


def _unknown(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return memory that holds nothing of use, as a GPU's does in rows that nobody computes."""
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
        found: list[torch.Tensor] = []
        _loop(
            ends,
            lambda _, begin, end: found.append(
                torch.matmul(grads[begin:end].t(), rows[begin:end]),
            ),
        )
        return found


def _cpu_sums(grads: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        found: list[torch.Tensor] = []
        _loop(ends, lambda _, begin, end: found.append(grads[begin:end].sum(0)))
        return torch.stack(found)


_LIBRARY = torch.library.Library("chunkgraph", "FRAGMENT")
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
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor
    ) -> torch.Tensor:
        """See `GroupedGemm`."""
        result: torch.Tensor = _operators.grouped_rows(rows, list(weights), ends, False)
        return result

    def row_grads(
        self, grads: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor
    ) -> torch.Tensor:
        """See `GroupedGemm`."""
        result: torch.Tensor = _operators.grouped_rows(grads, list(weights), ends, True)
        return result

    def weight_grads(
        self, grads: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """See `GroupedGemm`."""
        result: list[torch.Tensor] = _operators.grouped_weight_grads(grads, rows, ends)
        return result

    def sums(self, grads: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See `GroupedGemm`."""
        result: torch.Tensor = _operators.grouped_sums(grads, ends)
        return result


class TorchGemm:
    """Runs `torch._grouped_mm`, whose offsets stay on the device."""

    def rows(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor
    ) -> torch.Tensor:
        """See `GroupedGemm`."""
        return torch._grouped_mm(rows, as_one(weights).transpose(-2, -1), offs=ends)

    def row_grads(
        self, grads: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor
    ) -> torch.Tensor:
        """See `GroupedGemm`."""
        return torch._grouped_mm(grads, as_one(weights), offs=ends)

    def weight_grads(
        self, grads: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """See `GroupedGemm`."""
        found = torch._grouped_mm(grads.t(), rows, offs=ends)
        return zero_empty(found, ends).unbind(0)

    def sums(self, grads: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See `GroupedGemm`."""
        ones = torch.ones(grads.shape[0], _SUMMED, dtype=grads.dtype, device=grads.device)
        found = torch._grouped_mm(grads.t(), ones, offs=ends)
        return zero_empty(found, ends)[:, :, 0]


def choose_gemm(device: torch.device, dtype: torch.dtype) -> tuple[GroupedGemm | None, str]:
    """Return what multiplies the experts of a graph on ``device``, and its name.

    Without any, the name says why there is none.

    Args:
        device: of the experts.
        dtype: of their weights.
    """
    if device.type == "cpu":
        return LoopGemm(), "a loop over experts in one operator (CPU)"
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
        return None, f"weights of {dtype}: torch._grouped_mm multiplies bfloat16; set bf16"
    return TorchGemm(), f"torch._grouped_mm (torch {torch.__version__})"


@dataclass(frozen=True)
class _Product:
    """What the backward of a product needs besides tensors."""

    gemm: GroupedGemm


class _GroupedLinear(torch.autograd.Function):
    """Rows times the weight of their expert."""

    @staticmethod
    def forward(
        ctx: Any,
        product: _Product,
        rows: torch.Tensor,
        ends: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(rows, ends, *weights)
        return product.gemm.rows(rows, weights, ends)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        gemm, grads = ctx.product.gemm, grads.contiguous()
        of_rows = gemm.row_grads(grads, weights, ends) if ctx.needs_input_grad[1] else None
        wanted = ctx.needs_input_grad[3:]
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        if any(wanted):
            found = gemm.weight_grads(grads, rows, ends)
            of_weights = [
                g if is_wanted else None for g, is_wanted in zip(found, wanted, strict=True)
            ]
        return None, of_rows, None, *of_weights


class _BiasRows(torch.autograd.Function):
    """The bias of each row's expert, a row for each."""

    @staticmethod
    def forward(
        ctx: Any,
        product: _Product,
        experts: torch.Tensor,
        ends: torch.Tensor,
        *biases: torch.Tensor,
    ) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(ends)
        return torch.stack(biases).index_select(0, experts)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ends,) = ctx.saved_tensors
        return None, None, None, *ctx.product.gemm.sums(grads.contiguous(), ends).unbind(0)


def grouped_linear(
    gemm: GroupedGemm, rows: torch.Tensor, ends: torch.Tensor, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Multiply rows by the weight of their expert, with gradients.

    Args:
        gemm: see `choose_gemm`.
        rows: shape [num_rows, in], sorted by expert.
        ends: shape [experts], int32: where the rows of each expert end.
        weights: shape [out, in] each.

    Returns:
        Shape [num_rows, out]; rows after the last end hold anything.
    """
    result: torch.Tensor = _GroupedLinear.apply(_Product(gemm), rows, ends, *weights)
    return result


def add_biases(
    gemm: GroupedGemm, num_rows: int, ends: torch.Tensor, biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the bias of each row's expert, shape [num_rows, out], with gradients.

    Args:
        gemm: see `choose_gemm`.
        num_rows: of the buffer.
        ends: as of `grouped_linear`.
        biases: shape [out] each.
    """
    places = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    experts = torch.searchsorted(ends, places, right=True).clamp(max=len(biases) - 1)
    result: torch.Tensor = _BiasRows.apply(_Product(gemm), experts, ends, *biases)
    return result
