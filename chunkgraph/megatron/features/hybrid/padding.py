"""Mamba layers on packed rows: rows behind the last document go in and come out as zeros.

Nothing in a mixer leaves rows out: the gradients of its weights add up products over all of them,
and 0 times NaN is NaN. So whatever lies behind the last document is cleared before a layer and
behind it, by selection. Behind it also clears what comes back there as a gradient.

Padding between documents (context parallelism, ``pad_seq_to_mult``) is left as it is. With zeros
there graphs left eager training in the last bits, most likely since a kernel adds up its decay
within a block of rows whatever document they belong to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from chunkgraph.megatron.core.access import import_megatron

__all__ = ["clear_mamba_padding", "rows_behind_documents"]

_LAYER = "megatron.core.ssm.mamba_layer"
_PARAMS = "packed_seq_params"
_HIDDEN = "hidden_states"


def clear_mamba_padding(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Clear what is behind the documents for all Mamba layers among the modules, eager or captured.

    Rows of documents keep their bits, and so do all gradients as long as the others are finite. A
    layer that is called without packed sequences is left alone.

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


def rows_behind_documents(
    offsets: torch.Tensor, padded: torch.Tensor | None, first: int, num_rows: int, size: int = 1
) -> torch.Tensor:
    """Which rows are behind the last document that has a token, bool [num_rows]; on the device.

    Each of C context-parallel ranks has one C-th of every document's rows, in the documents' order
    (the rule of Transformer Engine's ``thd_get_partitioned_indices``).

    Args:
        offsets: of the documents in tokens, [documents + 1].
        padded: the same in rows; None where documents have no padding behind them.
        first: of the rows that are asked for, among those of the rank.
        num_rows: how many are asked for.
        size: context-parallel ranks.
    """
    ends = (offsets if padded is None else padded)[1:]
    end = (ends * (offsets.diff() > 0)).amax() // size
    rows = torch.arange(first, first + num_rows, device=offsets.device, dtype=offsets.dtype)
    return rows >= end


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
    padding = rows_behind_documents(
        params.cu_seqlens_q, params.cu_seqlens_q_padded, first, num_rows, layer.mixer.cp.cp_size
    )
    return padding[:, None, None]
