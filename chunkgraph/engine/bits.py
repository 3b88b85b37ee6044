"""Compare tensors to the last bit, and describe differences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["describe_difference", "has_nan", "same_bits", "tensors_in"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bytes: NaNs equal themselves, 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def describe_difference(replayed: torch.Tensor, eager: torch.Tensor) -> str:
    """Describe how two tensors that are not `same_bits` differ. Waits for the device."""
    if replayed.shape != eager.shape or replayed.dtype != eager.dtype:
        return (
            f"{tuple(replayed.shape)} {replayed.dtype} replayed, "
            f"{tuple(eager.shape)} {eager.dtype} eager"
        )
    size = max(1, replayed.element_size())
    differs = (_bytes(replayed) != _bytes(eager)).view(-1, size).any(dim=1)
    first = int(differs.nonzero()[0])
    a, b = replayed.detach().reshape(-1)[first].item(), eager.detach().reshape(-1)[first].item()
    return (
        f"{int(differs.sum())} of {replayed.numel()} elements differ (shape "
        f"{tuple(replayed.shape)}; the first, number {first}: {a!r} replayed, {b!r} eager)"
    )


def has_nan(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether any floating-point tensor holds a NaN. Waits for the device once."""
    flags = [
        t.detach().isnan().any()
        for t in tensors
        if t is not None and (t.is_floating_point() or t.is_complex())
    ]
    return bool(torch.stack(flags).any()) if flags else False


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [t for item in tree for t in tensors_in(item)]
    return []


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
