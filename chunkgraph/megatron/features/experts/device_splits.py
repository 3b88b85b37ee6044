"""Numbers of rows of each expert that only the device knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

__all__ = ["DeviceSplits"]


@dataclass(frozen=True)
class DeviceSplits:
    """Replacement for Megatron's ``tokens_per_expert`` on the device.

    Attributes:
        ends: End of each local expert's rows, shape [experts], int32, on the device.
    """

    ends: torch.Tensor
    _offsets: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def tolist(self) -> DeviceSplits:
        """Return this object: Megatron asks for a list, but only passes it on."""
        return self

    def sum(self) -> torch.Tensor:
        """Return the number of rows in use, a scalar on the device."""
        return self.ends[-1]

    @cached_property
    def counts(self) -> torch.Tensor:
        """Number of rows of each expert, shape [experts], int64."""
        return self._begins.diff()

    def offsets(self, width: int) -> torch.Tensor:
        """Return the first element of each expert in rows of ``width`` elements, and the end.

        Returns:
            Tensor of shape [experts + 1], int64. Calls with one width share it.
        """
        if width not in self._offsets:
            self._offsets[width] = self._begins * width
        return self._offsets[width]

    @cached_property
    def _begins(self) -> torch.Tensor:
        return torch.nn.functional.pad(self.ends.long(), (1, 0))
