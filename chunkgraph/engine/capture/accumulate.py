"""``sink += gradient``, in one pass at the speed of memory.

torch's own kernel for operands of different types converts element by element, and reaches about
half of the memory's speed: for a bfloat16 gradient into a float32 ``main_grad`` that is a fifth of
a training step. A float32 sum of the same two values has one right result, so this one is
equal to the last bit.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Accumulate", "new_accumulate"]

Accumulate = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds its second argument to the first, in place, on the current stream."""

_HALF = (torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16


def new_accumulate(sinks: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> Accumulate:
    """What adds gradients of ``dtypes`` to ``sinks``, compiled and loaded.

    Nothing may be compiled or loaded during a capture, so this comes before it.

    Args:
        sinks: float tensors on one device.
        dtypes: of the gradients, one for each sink.
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
