"""Copy into fixed memory at the least cost for the host: one call of the CUDA driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["memcpy_into"]


def memcpy_into(
    target: torch.Tensor, otherwise: Callable[[torch.Tensor], object]
) -> Callable[[torch.Tensor], object]:
    """Return a function that copies a tensor of the same dtype, shape and strides to ``target``.

    Args:
        target: the memory to write, on the current stream.
        otherwise: copies instead without NVIDIA's bindings, on other devices, and if the target has
            gaps or repeats; torch's copy costs the host several times as much.
    """
    size = target.numel() * target.element_size()
    try:
        from cuda.bindings import driver
    except ImportError:
        return otherwise
    is_dense = torch.empty_like(target, device="meta").stride() == target.stride()
    if not (target.is_cuda and size and is_dense):
        return otherwise
    address, device = target.data_ptr(), target.device
    memcpy: Any = driver.cuMemcpyDtoDAsync
    stream_of: Any = torch._C._cuda_getCurrentRawStream
    success = driver.CUresult.CUDA_SUCCESS

    def copy(source: torch.Tensor) -> None:
        pointer = source.data_ptr()
        if pointer and source.device == device and not (source.is_neg() or source.is_conj()):
            (status,) = memcpy(address, pointer, size, stream_of(device.index))
            if status != success:
                raise RuntimeError(f"cuMemcpyDtoDAsync failed: {status!r}")
        else:  # of zeros without memory, of another device, lazily negated
            otherwise(source)

    return copy
