"""Add gradients to sinks, ``sink += gradient``, at memory bandwidth.

torch's kernel for operands of different dtypes converts element by element and reaches about half
of the memory bandwidth: adding bfloat16 gradients to a float32 ``main_grad`` then takes a fifth of
a training step. A float32 sum of the same two values has one correct result, so this kernel equals
torch's to the last bit.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Accumulate", "new_accumulate"]

Accumulate = Callable[[torch.Tensor, torch.Tensor], None]
"""A function that adds its second argument to the first, in place, on the current stream."""

_HALF = (torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16


def new_accumulate(sinks: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> Accumulate:
    """Return a function that adds gradients to ``sinks``, with its kernels compiled and loaded.

    Call it before a capture, during which nothing may be compiled or loaded.

    Args:
        sinks: float tensors on one device.
        dtypes: the dtype of each sink's gradient.
    """
    pairs = {(sink.dtype, dtype) for sink, dtype in zip(sinks, dtypes, strict=True)}
    mixed = [dtype for sink, dtype in pairs if sink == torch.float32 and dtype in _HALF]
    if not mixed or not sinks[0].is_cuda or importlib.util.find_spec("triton") is None:
        return _add
    launch: Callable[[torch.Tensor, torch.Tensor], None]
    launch = importlib.import_module("chunkgraph.engine.capture.accumulate_kernel").add_mixed
    for dtype in mixed:
        sample = torch.zeros(1024, device=sinks[0].device)
        launch(sample, sample.to(dtype))
    return lambda sink, gradient: (launch if _fits(sink, gradient) else _add)(sink, gradient)


def _fits(sink: torch.Tensor, gradient: torch.Tensor) -> bool:
    return (
        sink.dtype == torch.float32
        and gradient.dtype in _HALF
        and sink.shape == gradient.shape
        and sink.is_contiguous()
        and gradient.is_contiguous()
        and not (sink.data_ptr() | gradient.data_ptr()) % _ALIGNMENT_BYTES
    )


def _add(sink: Any, gradient: torch.Tensor) -> None:
    sink.add_(gradient)
