"""Mamba layers on packed rows: rows without a token go in and come out as zeros.

Nothing in a mixer leaves rows out: the gradients of its weights add up products over all of them,
and 0 times NaN is NaN. So what lies in rows that belong to no document is cleared before a layer
and behind it, by selection. Behind it also clears what comes back there as a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from chunkgraph.megatron.compat.access import import_megatron

__all__ = ["clear_mamba_padding", "rows_without_token"]

_LAYER = "megatron.core.ssm.mamba_layer"
_PARAMS = "packed_seq_params"
_HIDDEN = "hidden_states"


def clear_mamba_padding(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Clear the padding of all Mamba layers among the modules, in eager passes and captured ones.

    Rows with a token keep their bits, and so do all gradients as long as padding is finite. A layer
    that is called without packed sequences is left alone.

    Returns:
        A function that ends it.
    """
    kind = getattr(sys.modules.get(_LAYER), "MambaLayer", None)
    undo = ExitStack()
    for module in modules:
        if kind is not None and isinstance(module, kind):
            cleared = _Cleared()
            for handle in (
                module.register_forward_pre_hook(cleared.enter, with_kwargs=True),
                module.register_forward_hook(cleared.leave, with_kwargs=True),
            ):
                undo.callback(handle.remove)
    return undo.close


def rows_without_token(
    offsets: torch.Tensor,
    padded: torch.Tensor | None,
    first: int,
    num_rows: int,
    share: tuple[int, int] = (0, 1),
) -> torch.Tensor:
    """Which rows hold no token, bool [num_rows]; computed on the device.

    Of C context-parallel ranks each has two of the 2 C equal pieces of every document, its first
    one counted from the front and the other from the back (the rule of Transformer Engine's
    ``thd_get_partitioned_indices``).

    Args:
        offsets: of the documents in tokens, [documents + 1].
        padded: the same in rows; None where documents have no padding behind them.
        first: of the rows that are asked for, among those of the rank.
        num_rows: how many are asked for.
        share: context-parallel rank, and their number.
    """
    rank, size = share
    lengths, starts = offsets.diff(), offsets if padded is None else padded
    pieces = starts.diff() // (2 * size)
    starts = starts // size
    rows = torch.arange(first, first + num_rows, device=offsets.device, dtype=offsets.dtype)
    document = torch.searchsorted(starts[1:], rows, right=True).clamp(max=lengths.numel() - 1)
    place = rows - starts[document]
    if size > 1:
        piece = pieces[document]
        skipped = torch.where(place < piece, rank, 2 * (size - 1) - rank)
        place = place + skipped * piece
    return (place >= lengths[document]) | (rows >= starts[-1])


class _Cleared:
    """One layer, whose padding is found where it is entered."""

    def __init__(self) -> None:
        self._padding: torch.Tensor | None = None

    def enter(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The layer's arguments with zeros in padding rows, whatever lies there."""
        hidden = args[0] if args else kwargs[_HIDDEN]
        self._padding = _padding_of(layer, kwargs, hidden.size(0))
        if self._padding is None:
            return None
        cleared = hidden.masked_fill(self._padding, 0.0)
        return ((cleared, *args[1:]), kwargs) if args else ((), {**kwargs, _HIDDEN: cleared})

    def leave(
        self, _layer: nn.Module, _args: Any, _kwargs: Any, result: torch.Tensor
    ) -> torch.Tensor | None:
        """The layer's result, through whose padding rows no gradient comes back."""
        padding, self._padding = self._padding, None
        return None if padding is None else result.masked_fill(padding, 0.0)


def _padding_of(layer: Any, kwargs: dict[str, Any], num_rows: int) -> torch.Tensor | None:
    """Of this rank's rows, [rows, 1, 1]; None where there are no documents."""
    params = kwargs.get(_PARAMS)
    if params is None or params.qkv_format != "thd" or params.cu_seqlens_q is None:
        return None
    first = 0
    if layer.config.sequence_parallel:
        state = import_megatron("megatron.core.parallel_state")
        first = state.get_tensor_model_parallel_rank() * num_rows
    split = layer.mixer.cp
    share = (split.cp_rank, split.cp_size) if split.cp_size > 1 else (0, 1)
    padding = rows_without_token(
        params.cu_seqlens_q, params.cu_seqlens_q_padded, first, num_rows, share
    )
    return padding[:, None, None]
