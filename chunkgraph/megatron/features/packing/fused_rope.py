"""Transformer Engine's fused rotary embedding of packed sequences, launched once for each row.

Its kernel for packed sequences launches a block for every entry of the table in every sequence,
empty or not: with 64 sequences in 1024 rows that takes a fifth of a layer's time. (From release
2.19 on, it has a kernel with a block for each row, and uses it if that saves 65536 blocks or more.)
Its kernel for plain sequences does the same arithmetic with a table that has an entry for each row
and is shared by all layers. Without the table it takes less time than either kernel (H200, 4096
rows: 81 us instead of 105 us in a layer). A test run compares the bits before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from chunkgraph.engine.verify import same_bits

__all__ = ["blocks_spared", "fused_by_row", "pays"]

_log = logging.getLogger(__name__)

Fused = Callable[..., torch.Tensor]
"""``fused(t, cu_seqlens, freqs, cp_size=1, cp_rank=0)``: tokens [rows, heads, width], rotated."""

RowsOf = Callable[[int, torch.Tensor, torch.Tensor, int, int], torch.Tensor]
"""Maps rows, offsets, table, ranks and rank to the entry of each row: [rows, 1, 1, width]."""

# An idle block takes 0.6 ns on an H200 (the four kernels of a layer of 512 rows: 95 us with 64
# sequences, 179 us with 128), so this number takes 20 us a layer. The table by row takes seven
# small kernels, 11 to 16 us, for all layers (more on context-parallel ranks).
_LEAST_SPARED = 1 << 13
# From this number on, Transformer Engine may use its own kernel for each row, compared separately:
# `use_fused_rope_thd_linear_grid_launch` in its common/fused_rope/fused_rope.cu.
_OWN_LEAST_SPARED = 1 << 16


def pays(num_spared: int) -> bool:
    """Return whether saving so many blocks is worth a table by row."""
    return num_spared >= _LEAST_SPARED


def blocks_spared(num_rows: int, num_seqs: int, num_freqs: int) -> int:
    """Return the number of blocks without a row in the kernel for packed sequences.

    Args:
        num_rows: Tokens on this rank.
        num_seqs: Sequences, including empty ones.
        num_freqs: Length of the table.
    """
    return num_seqs * num_freqs - num_rows


def fused_by_row(own: Fused | None, plain: Fused | None, rows_of: RowsOf) -> Fused | None:
    """Return a replacement for ``own``; None without Transformer Engine.

    This runs both kernels, so it must not be called during a capture. If their results differ, or
    they cannot run, the replacement calls ``own``, and logs that at the first call for which the
    other kernel would pay.

    Args:
        own: Megatron's ``fused_apply_rotary_pos_emb_thd``.
        plain: Megatron's ``fused_apply_rotary_pos_emb``.
        rows_of: Returns the table by row.
    """
    if own is None or plain is None:
        return None
    by_row = _by_row(plain, rows_of)
    of_few, of_many = (_obstacle(own, by_row, num_empty) for num_empty in (1, 1024))
    is_logged = False

    def fused(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        cp_size: int = 1,
        cp_rank: int = 0,
        **options: Any,
    ) -> torch.Tensor:
        nonlocal is_logged
        num_spared = blocks_spared(t.size(0), cu_seqlens.size(0) - 1, freqs.size(0))
        is_usual = t.dim() == 3 and freqs.dim() == 4 and freqs.size(1) == freqs.size(2) == 1
        # Interleaved embeddings are rare, and are not compared.
        is_compared = is_usual and not any(options.values())
        if is_compared and pays(num_spared):
            obstacle = of_few or (of_many if num_spared >= _OWN_LEAST_SPARED else "")
            if not obstacle:
                return by_row(t, cu_seqlens, freqs, cp_size, cp_rank)
            if not is_logged:
                _log.warning(
                    "RoPE of packed sequences uses Transformer Engine's kernel for them, which "
                    "takes longer for many sequences, empty or not, than the kernel that runs "
                    "once for each row; that kernel cannot be used here (%s).",
                    obstacle,
                )
                is_logged = True
        return own(t, cu_seqlens, freqs, cp_size=cp_size, cp_rank=cp_rank, **options)

    return fused


def _obstacle(own: Fused, by_row: Fused, num_empty: int) -> str:
    """Return why one cannot replace the other, or ""; see `_is_equal`."""
    try:
        is_equal = _is_equal(own, by_row, num_empty)
    except Exception as error:  # noqa: BLE001 - after any error the other one can be captured
        return str(error) or type(error).__name__
    return "" if is_equal else "its results differ in their last bits from those of the other"


def _by_row(plain: Fused, rows_of: RowsOf) -> Fused:
    def by_row(
        t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, cp_size: int, cp_rank: int
    ) -> torch.Tensor:
        rows = rows_of(t.size(0), cu_seqlens, freqs, cp_size, cp_rank)
        return plain(t.unsqueeze(1), rows).squeeze(1)

    return by_row


def _is_equal(own: Fused, by_row: Fused, num_empty: int) -> bool:
    """Return whether both give the same bits, forward and backward, for several lengths.

    The documents are followed by ``num_empty`` empty sequences; with 1024 Transformer Engine uses
    its own kernel for each row.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(1)

    def random_values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    ends = [0, 8, 8, 48, 56, 64]
    freqs = random_values(64, 1, 1, 32) * 100
    offsets = torch.tensor(ends + [64] * num_empty, dtype=torch.int32, device=device)
    for cp_size, cp_rank in ((1, 0), (2, 0), (2, 1), (4, 1), (4, 3)):
        tokens, gradient = (random_values(64 // cp_size, 3, 40).bfloat16() for _ in range(2))
        results = []
        for rotate in (own, by_row):
            with torch.enable_grad():
                inputs = tokens.clone().requires_grad_()
                result = rotate(inputs, offsets, freqs, cp_size=cp_size, cp_rank=cp_rank)
                (of_inputs,) = torch.autograd.grad(result, inputs, gradient)
            results.append((result.detach(), of_inputs))
        if not all(same_bits(a, b) for a, b in zip(*results, strict=True)):
            return False
    return True
