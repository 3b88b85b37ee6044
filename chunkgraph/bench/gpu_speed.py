"""Measure the current speed of a rank's GPU, which heat, power or neighbours may reduce."""

from __future__ import annotations

import torch

__all__ = ["matmul_tflops"]

_SIZE = 4096
_NUM_WARMUP, _NUM_MEASURED = 3000, 1000


def matmul_tflops(device: torch.device) -> float | None:
    """Measure products of two 4096 x 4096 bfloat16 matrices.

    The load lasts half a second or more, since a GPU may be slow only under sustained load. It
    uses 96 MiB and cuBLAS's workspace, and draws no random numbers of the training.

    Returns:
        The speed in 10^12 operations per second; None on a CPU, or without enough memory.
    """
    if device.type != "cuda":
        return None
    try:
        return _measure(device)
    except torch.cuda.OutOfMemoryError:
        return None


def _measure(device: torch.device) -> float:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16, generator=generator)
        for _ in range(2)
    )
    product = torch.empty_like(a)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(_NUM_WARMUP):
        torch.mm(a, b, out=product)
    begin.record()
    for _ in range(_NUM_MEASURED):
        torch.mm(a, b, out=product)
    end.record()
    end.synchronize()
    return 2e-12 * _SIZE**3 * _NUM_MEASURED / (begin.elapsed_time(end) / 1e3)
