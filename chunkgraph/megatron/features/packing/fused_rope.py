"""Transformer Engine's fused rotary embedding of packed sequences, started once for each row.

Its kernel for packed sequences is started for every entry of the table in every sequence, empty or
not: with 64 sequences in 1024 rows that takes a fifth of a layer's time. (From release 2.19 on, it
has one that is started for each row, and takes it where that spares 65536 blocks or more.) Its
kernel for plain sequences does the same arithmetic with a table that has an entry for each row,
which all layers share; but for the table it takes less time than either (H200, 4096 rows: 81 us of
a layer for 105). Whether the last bits are the same is tried out before it is used.
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
"""Of rows, offsets, table, ranks and rank: the table's entry of each row, [rows, 1, 1, width]."""

# An idle block takes 0.6 ns of an H200 (the four kernels of a layer of 512 rows: 95 us with 64
# sequences, 179 with 128): 20 us a layer for so many. The table by row takes seven small kernels,
# 11 to 16 us, for all layers (some more on context-parallel ranks).
_LEAST_SPARED = 1 << 13
# From so many on Transformer Engine may take its own kernel for each row, whose bits are tried out
# apart: `use_fused_rope_thd_linear_grid_launch` in its common/fused_rope/fused_rope.cu.
_OWN_LEAST_SPARED = 1 << 16


def pays(num_spared: int) -> bool:
    """Whether starting so many blocks less is worth a table by row."""
    return num_spared >= _LEAST_SPARED


def blocks_spared(num_rows: int, num_seqs: int, num_freqs: int) -> int:
    """Blocks of the kernel for packed sequences that have no row.

    Args:
        num_rows: tokens on this rank.
        num_seqs: sequences, empty ones too.
        num_freqs: length of the table.
    """
    return num_seqs * num_freqs - num_rows


def fused_by_row(own: Fused | None, plain: Fused | None, rows_of: RowsOf) -> Fused | None:
    """What to use in the place of ``own``; None without Transformer Engine.

    It tries out the kernels, so it must not be called during a capture. Where they differ, or
    cannot be tried, the result calls ``own``, and says so at the first call that had better not.

    Args:
        own: Megatron's ``fused_apply_rotary_pos_emb_thd``.
        plain: its ``fused_apply_rotary_pos_emb``.
        rows_of: gives the table by row.
    """
    if own is None or plain is None:
        return None
    by_row = _by_row(plain, rows_of)
    of_few, of_many = (_obstacle(own, by_row, num_empty) for num_empty in (1, 1024))
    is_told = False

    def fused(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        cp_size: int = 1,
        cp_rank: int = 0,
        **options: Any,
    ) -> torch.Tensor:
        nonlocal is_told
        num_spared = blocks_spared(t.size(0), cu_seqlens.size(0) - 1, freqs.size(0))
        is_usual = t.dim() == 3 and freqs.dim() == 4 and freqs.size(1) == freqs.size(2) == 1
        # Interleaved ones are rare, and were not tried out.
        wants_rows = is_usual and not any(options.values())
        if wants_rows and pays(num_spared):
            obstacle = of_few or (of_many if num_spared >= _OWN_LEAST_SPARED else "")
            if not obstacle:
                return by_row(t, cu_seqlens, freqs, cp_size, cp_rank)
            if not is_told:
                _log.warning(
                    "RoPE of packed sequences keeps Transformer Engine's kernel for them, which "
                    "takes longer for many sequences, empty or not, than the one that is started "
                    "once for each row; that cannot be used here (%s).",
                    obstacle,
                )
                is_told = True
        return own(t, cu_seqlens, freqs, cp_size=cp_size, cp_rank=cp_rank, **options)

    return fused


def _obstacle(own: Fused, by_row: Fused, num_empty: int) -> str:
    """Why one cannot take the place of the other, or ""; see `_is_equal`."""
    try:
        is_equal = _is_equal(own, by_row, num_empty)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other one can be captured
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
    """Whether both give the same bits, forward and backward, on documents of several lengths.

    They lie among ``num_empty`` empty sequences; with 1024 Transformer Engine starts its own kernel
    for each row.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    ends = [0, 8, 8, 48, 56, 64]
    freqs = drawn(64, 1, 1, 32) * 100
    offsets = torch.tensor(ends + [64] * num_empty, dtype=torch.int32, device=device)
    for cp_size, cp_rank in ((1, 0), (2, 0), (2, 1), (4, 1), (4, 3)):
        tokens, gradient = (drawn(64 // cp_size, 3, 40).bfloat16() for _ in range(2))
        found = []
        for rotate in (own, by_row):
            with torch.enable_grad():
                given = tokens.clone().requires_grad_()
                result = rotate(given, offsets, freqs, cp_size=cp_size, cp_rank=cp_rank)
                (of_given,) = torch.autograd.grad(result, given, gradient)
            found.append((result.detach(), of_given))
        if not all(same_bits(a, b) for a, b in zip(*found, strict=True)):
            return False
    return True
