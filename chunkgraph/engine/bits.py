"""Compare tensors to the last bit; look for NaN, and for memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["has_memory", "has_nan", "same_bits"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bytes: NaNs equal themselves, 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def has_nan(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether any floating-point tensor holds a NaN. Waits for the device once."""
    flags = [
        t.detach().isnan().any()
        for t in tensors
        if t is not None and (t.is_floating_point() or t.is_complex())
    ]
    return bool(torch.stack(flags).any()) if flags else False


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its own dense memory, unlike sparse and wrapper tensors."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not tensor.is_quantized
        and not torch.nn.parameter.is_lazy(tensor)
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0  # 0: its owner has freed it
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
