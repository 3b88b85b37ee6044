"""torch's automatic casting: a graph holds the operators as they were cast in its capture."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

__all__ = ["Autocast"]


@dataclass(frozen=True)
class Autocast:
    """What `torch.autocast` is set to on this thread, for one type of device.

    Attributes:
        device_type: for example ``cuda``.
        dtype: what is cast to; None: nothing is.
    """

    device_type: str
    dtype: torch.dtype | None

    @staticmethod
    def now(device_type: str) -> Autocast:
        """As it is set."""
        is_enabled = torch.is_autocast_enabled(device_type)
        return Autocast(device_type, torch.get_autocast_dtype(device_type) if is_enabled else None)

    def entered(self) -> AbstractContextManager[object]:
        """Set it so in this block, without the cache of cast weights.

        What one graph cast lies in its own memory, and is of the parameters as they were at its own
        replay, so that no other graph may read it.
        """
        return torch.autocast(
            self.device_type,
            dtype=self.dtype,
            enabled=self.dtype is not None,
            cache_enabled=False,
        )

    def is_now(self) -> bool:
        """Whether it is still set so."""
        if self.dtype is None:
            return not torch.is_autocast_enabled(self.device_type)
        return self == Autocast.now(self.device_type)

    def __str__(self) -> str:
        return "off" if self.dtype is None else f"{self.dtype} on {self.device_type}"
