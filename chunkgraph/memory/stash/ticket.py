"""The page table of one stashed tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Ticket"]


@dataclass(frozen=True)
class Ticket:
    """A page table. If a captured forward creates it, it lies in the slot's memory.

    Attributes:
        table: Int32 [max_pages]: page numbers; those in use come first.
        taken: Int64 [3]: required pages, allocated device pages, allocated host pages.
    """

    table: torch.Tensor
    taken: torch.Tensor
