"""How fast the GPU of a rank is just now: some are slowed down, by heat, power or neighbours."""

from __future__ import annotations

import torch

__all__ = ["matmul_tflops"]

_SIZE = 4096
_NUM_WARMUP, _NUM_MEASURED = 3000, 1000


def matmul_tflops(device: torch.device) -> float | None:
    """Products of two bfloat16 matrices of 4096 x 4096, in 10^12 operations a second.

    Under a load that lasts, half a second and more, since a GPU may be slow under load alone.
    Takes 96 MiB and cuBLAS's workspace; no random number of training is drawn.

    Returns:
        None on a CPU, and where there is no memory left for it.
    """
    if device.type != "cuda":
        return None
    try:
        return _measured(device)
    except torch.cuda.OutOfMemoryError:
        return None


def _measured(device: torch.device) -> float:
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
