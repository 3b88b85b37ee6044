"""Rotary embedding of packed sequences without a look at the offsets on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from chunkgraph.megatron.compat.access import import_megatron, patch_attributes, private_names

__all__ = ["packed_rope", "rope_rows"]

_MODULE = "megatron.core.models.common.embeddings.rope_utils"
_REMEMBERED = "_chunkgraph_rope_rows"


@contextlib.contextmanager
def packed_rope() -> Iterator[None]:
    """Make Megatron's unfused packed RoPE take its frequencies on the device alone.

    Megatron's own splits the tokens by lengths that it reads on the host, which no graph can hold.
    The numbers are the same to the last bit. The fused kernel reads offsets on the device anyway.
    """
    _, apply = private_names(_MODULE, "_apply_rotary_pos_emb_thd", "_apply_rotary_pos_emb_bshd")

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

    undo = patch_attributes(import_megatron(_MODULE), {"_apply_rotary_pos_emb_thd": apply_packed})
    try:
        yield
    finally:
        undo()


def rope_rows(
    num_rows: int, cu_seqlens: torch.Tensor, num_freqs: int, cp_size: int = 1, cp_rank: int = 0
) -> torch.Tensor:
    """Which of the frequencies each row of this context-parallel rank takes, int64 [rows].

    As in Megatron, a table as long as all documents together holds the frequencies of every place
    in the pack; any other starts anew for each document. Which of the two it is may change with
    the offsets, so it is decided on the device. Rows behind the last document get an entry that
    exists, and rows of a document that is longer than the table its last one: lengths are checked
    on the host, before the step.

    Args:
        num_rows: tokens on this rank.
        cu_seqlens: offsets over all ranks, int32 [documents + 1].
        num_freqs: length of the table.
        cp_size: context-parallel ranks.
        cp_rank: of them, this one.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long() // cp_size
    ends = lengths.cumsum(0)
    rows = torch.arange(num_rows, device=cu_seqlens.device)
    document = torch.searchsorted(ends, rows, right=True).clamp(max=lengths.size(0) - 1)
    length = lengths[document]
    place = rows - (ends[document] - length)
    if cp_size > 1:  # the rank has the piece number cp_rank from the front, and from the back
        piece = length // 2
        from_back = length * cp_size - (cp_rank + 1) * piece + place - piece
        place = torch.where(place < piece, cp_rank * piece + place, from_back)
    is_whole_pack = (cu_seqlens[-1:] == num_freqs).long()
    place = place + is_whole_pack * cu_seqlens[:-1][document]
    return place.clamp(0, num_freqs - 1)


def _rows(
    num_rows: int, cu_seqlens: torch.Tensor, freqs: torch.Tensor, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """The frequencies of each row; all layers of a call share them, by way of its offsets."""
    remembered: dict[Any, Any] = getattr(cu_seqlens, _REMEMBERED, {})
    key = (id(freqs), num_rows, cp_size, cp_rank)
    if key not in remembered:
        rows = rope_rows(num_rows, cu_seqlens, freqs.size(0), cp_size, cp_rank)
        # With the table itself, so that no other can take its identity.
        remembered[key] = (freqs, freqs.index_select(0, rows))
        setattr(cu_seqlens, _REMEMBERED, remembered)
    return remembered[key][1]
