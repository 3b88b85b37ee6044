"""The Triton kernel of `accumulate`; imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["add_mixed"]

_BLOCK = 1024
# Larger blocks are slower by a quarter on an H200.


@triton.jit(do_not_specialize=["n"])
def _add_mixed(sink, gradient, n, sink_step, gradient_step, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    pair = tl.program_id(1).to(tl.int64)
    sink += pair * sink_step
    gradient += pair * gradient_step
    total = tl.load(sink + at, inside) + tl.load(gradient + at, inside).to(tl.float32)
    tl.store(sink + at, total, inside)


def add_mixed(
    sink: torch.Tensor,
    gradient: torch.Tensor,
    count: int = 1,
    sink_step: int = 0,
    gradient_step: int = 0,
) -> None:
    """Add half-precision tensors to float32 ones, all contiguous and aligned to 16 bytes.

    Args:
        sink: The first target.
        gradient: The first tensor that is added.
        count: Number of pairs.
        sink_step: Elements from one target to the next, a multiple of 16.
        gradient_step: Elements from one added tensor to the next, a multiple of 16.
    """
    n = sink.numel()
    _add_mixed[(triton.cdiv(n, _BLOCK), count)](
        sink, gradient, n, sink_step, gradient_step, BLOCK=_BLOCK, num_warps=8
    )
