"""Rotary embedding of packed sequences by row, without host reads of the offsets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.core.capturing import is_in_backward

_MODULE = "megatron.core.models.common.embeddings.rope_utils"
_CACHE = "_chunkgraph_rope_rows"


@contextlib.contextmanager
def packed_rope() -> Iterator[None]:
    """Make Megatron's packed RoPE select its frequencies by row, on the device only.

    Megatron's unfused version splits the tokens by lengths that it reads on the host, which cannot
    be captured. The fused version could be captured as it is, but see `fused_by_row`. Results are
    bitwise the same.
    """
    _, apply = private_names(_MODULE, "_apply_rotary_pos_emb_thd", "_apply_rotary_pos_emb_bshd")
    fused, plain = private_names(
        _MODULE, "fused_apply_rotary_pos_emb_thd", "fused_apply_rotary_pos_emb"
    )

    def apply_packed(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        *,
        cp_group: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        if cp_group is None:
            raise ValueError("packed rotary embeddings need the context-parallel group")
        rows = _rows(t.size(0), cu_seqlens, freqs, cp_group.size(), cp_group.rank())
        result = apply(t.unsqueeze(1), rows, rotary_interleaved=rotary_interleaved, **options)
        return result.squeeze(1)

    patches: dict[str, Any] = {"_apply_rotary_pos_emb_thd": apply_packed}
    by_row = fused_by_row(fused, plain, functools.partial(_rows, restarts=True))
    if by_row is not None:
        patches["fused_apply_rotary_pos_emb_thd"] = by_row
    with contextlib.ExitStack() as undo:
        undo.callback(patch_attributes(import_megatron(_MODULE), patches))
        yield


def rope_rows(
    num_rows: int,
    cu_seqlens: torch.Tensor,
    num_freqs: int,
    cp_size: int = 1,
    cp_rank: int = 0,
    *,
    restarts: bool = False,
) -> torch.Tensor:
    """Return the index of the frequency of each row on this context-parallel rank, int32 [rows].

    As in Megatron, a table as long as all documents together contains the frequencies of every
    place in the pack; any other table restarts with each document. The case may change with the
    offsets, so it is decided on the device. Rows after the last document get a valid entry, and
    rows past the end of the table get its last entry: lengths are checked on the host before the
    step.

    Args:
        num_rows: Tokens on this rank.
        cu_seqlens: Offsets over all ranks, int32 [documents + 1], from 0; with context parallelism
            multiples of twice ``cp_size``.
        num_freqs: Length of the table.
        cp_size: Number of context-parallel ranks.
        cp_rank: This rank among them.
        restarts: Whether the table restarts with each document, however long it is.
    """
    # Offsets on this rank. Use few kernels: each takes longer to launch than to run.
    bounds = cu_seqlens if cp_size == 1 else cu_seqlens // cp_size
    rows = torch.arange(num_rows, dtype=bounds.dtype, device=bounds.device)
    document = torch.searchsorted(bounds[1:], rows, right=True).clamp(max=bounds.size(0) - 2)
    start = bounds.index_select(0, document)
    place = rows - start
    if cp_size > 1:  # the rank has piece number cp_rank from the front, and from the back
        length = bounds.index_select(0, document + 1) - start
        piece = length // 2
        from_back = length * cp_size - (cp_rank + 1) * piece + place - piece
        place = torch.where(place < piece, cp_rank * piece + place, from_back)
    if not restarts:
        is_whole_pack = (cu_seqlens[-1:] == num_freqs).to(place.dtype)
        place = place + is_whole_pack * cu_seqlens.index_select(0, document)
    return place.clamp(0, num_freqs - 1)


def _rows(
    num_rows: int,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    *,
    restarts: bool = False,
) -> torch.Tensor:
    """Return the frequencies of each row, cached on the offsets for all layers of a call.

    Layers that are recomputed in a backward use a separate cache, which is cleared at its end, or
    when a layer has other frequencies.
    """
    cache: dict[Any, Any] = getattr(cu_seqlens, _CACHE, {})
    # Recomputation gives every layer a new tensor object on the table's memory.
    place = freqs.data_ptr(), freqs.dtype, freqs.shape, freqs.stride()
    key = (place, num_rows, cp_size, cp_rank, restarts)
    if key in cache:
        return cache[key][1]
    rows = rope_rows(num_rows, cu_seqlens, freqs.size(0), cp_size, cp_rank, restarts=restarts)
    by_row = freqs.index_select(0, rows)
    if is_in_backward():
        cache.clear()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: _forget(cu_seqlens))
    # Keep the table too, so that no other tensor can take its address.
    cache[key] = (freqs, by_row)
    setattr(cu_seqlens, _CACHE, cache)
    return by_row


def forget_rope_rows(packed_seq_params: Any) -> None:
    """Drop the cache of a call at its end; autograd keeps the tensors that it needs."""
    for value in vars(packed_seq_params).values():
        if isinstance(value, torch.Tensor):
            _forget(value)


def _forget(cu_seqlens: torch.Tensor) -> None:
    cu_seqlens.__dict__.pop(_CACHE, None)


Fused = Callable[..., torch.Tensor]
"""``fused(t, cu_seqlens, freqs, cp_size=1, cp_rank=0)``: tokens [rows, heads, width], rotated."""

RowsOf = Callable[[int, torch.Tensor, torch.Tensor, int, int], torch.Tensor]
"""Maps rows, offsets, table, ranks and rank to the entry of each row: [rows, 1, 1, width]."""

# An idle block takes 0.6 ns on an H200 (the four kernels of a layer of 512 rows: 95 us with 64
# sequences, 179 us with 128), so this number takes 20 us a layer. The table by row takes seven
# small kernels, 11 to 16 us, for all layers (more on context-parallel ranks).
_LEAST_SPARED = 1 << 13
"""Blocks without a row in the kernel for packed sequences, from which a table by row pays."""


def fused_by_row(own: Fused | None, plain: Fused | None, rows_of: RowsOf) -> Fused | None:
    """Return a replacement for ``own``; None without Transformer Engine.

    Transformer Engine's kernel for packed sequences launches a block for every entry of the table
    in every sequence, empty or not: with 64 sequences in 1024 rows that takes a fifth of a layer's
    time. (From release 2.19 on, it has a kernel with a block for each row, and uses it if that
    saves 65536 blocks or more.) Its kernel for plain sequences does the same arithmetic with a
    table that has an entry for each row and is shared by all layers. Without the table it takes
    less time than either kernel (H200, 4096 rows: 81 us instead of 105 us in a layer).

    A release whose two kernels differ in their bits fails the self-test of the capture.

    Args:
        own: Megatron's ``fused_apply_rotary_pos_emb_thd``.
        plain: Megatron's ``fused_apply_rotary_pos_emb``.
        rows_of: Returns the table by row.
    """
    if own is None or plain is None:
        return None

    def fused(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        cp_size: int = 1,
        cp_rank: int = 0,
        **options: Any,
    ) -> torch.Tensor:
        num_spared = (cu_seqlens.size(0) - 1) * freqs.size(0) - t.size(0)
        is_usual = t.dim() == 3 and freqs.dim() == 4 and freqs.size(1) == freqs.size(2) == 1
        # Interleaved embeddings are rare, and nobody has compared them.
        if is_usual and not any(options.values()) and num_spared >= _LEAST_SPARED:
            rows = rows_of(t.size(0), cu_seqlens, freqs, cp_size, cp_rank)
            return plain(t.unsqueeze(1), rows).squeeze(1)
        return own(t, cu_seqlens, freqs, cp_size=cp_size, cp_rank=cp_rank, **options)

    return fused
