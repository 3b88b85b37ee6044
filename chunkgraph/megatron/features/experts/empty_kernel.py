"""The Triton kernel of `zero_empty`; imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_NUM_PROGRAMS = 32
"""Programs of each expert, few since most experts have rows and nothing to zero."""


@triton.jit(do_not_specialize=["n"])
def _zero_empty(grads, ends, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(1)
    end = tl.load(ends + expert)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if begin == end:
        zeros = tl.zeros([BLOCK], dtype=grads.dtype.element_ty)
        for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(grads + expert.to(tl.int64) * n + at, zeros, at < n)


def zero_empty(grads: torch.Tensor, ends: torch.Tensor) -> None:
    """Write zeros to contiguous ``grads`` [experts, out, in] where ``ends`` shows no rows."""
    n = grads[0].numel()
    num_programs = min(triton.cdiv(n, _BLOCK), _NUM_PROGRAMS)
    _zero_empty[(num_programs, grads.shape[0])](grads, ends, n, BLOCK=_BLOCK)
