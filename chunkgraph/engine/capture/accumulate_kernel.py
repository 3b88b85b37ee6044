"""The Triton kernel of `accumulate`; imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["add_mixed"]

_BLOCK = 1024
# Larger blocks are slower by a quarter on an H200.


@triton.jit(do_not_specialize=["n"])
def _add_mixed(sink, gradient, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(sink + at, inside) + tl.load(gradient + at, inside).to(tl.float32)
    tl.store(sink + at, total, inside)


def add_mixed(sink: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a half-precision tensor to a float32 one, both contiguous and aligned to 16 bytes."""
    n = sink.numel()
    _add_mixed[(triton.cdiv(n, _BLOCK),)](sink, gradient, n, BLOCK=_BLOCK, num_warps=8)
