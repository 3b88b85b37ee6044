"""Where the rows of one tensor went."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Ticket"]


@dataclass(frozen=True)
class Ticket:
    """A page table. Made in a captured forward, it lies in the slot's own memory.

    Attributes:
        table: int32 [max_pages]: page numbers, those in use in front.
        taken: int64 [3]: pages wanted, pages got on the device, pages got on the host.
    """

    table: torch.Tensor
    taken: torch.Tensor
