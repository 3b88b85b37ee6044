"""Compare tensors to the last bit, and look for NaN."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["has_nan", "same_bits"]


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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
