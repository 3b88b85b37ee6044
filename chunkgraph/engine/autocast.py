"""torch's autocast: a graph holds the operators as they were cast in its capture.

Inside a `torch.autocast` block a trainable leaf is cast once: all operators that read it share the
cast, and its gradients are summed in the lower precision. Captures do the same, but each capture
has its own casts: a cast lies in the memory of its graph and is computed in each replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Autocast"]


@dataclass(frozen=True)
class Autocast:
    """The setting of `torch.autocast` on a thread, for one device type.

    Attributes:
        device_type: device type, for example ``cuda``.
        dtype: dtype of casts; None: autocast is off.
        keeps_casts: whether casts of leaves are shared (``cache_enabled``).
    """

    device_type: str
    dtype: torch.dtype | None
    keeps_casts: bool = False

    @staticmethod
    def now(device_type: str) -> Autocast:
        """Return the present setting."""
        if not torch.is_autocast_enabled(device_type):
            return Autocast(device_type, None)
        dtype = torch.get_autocast_dtype(device_type)
        return Autocast(device_type, dtype, torch.is_autocast_cache_enabled())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the setting in this block, which shares no casts with code outside.

        Casts that the caller's autocast block has cached are lost.
        """
        with self.applied():
            torch.clear_autocast_cache()
            try:
                yield
            finally:
                torch.clear_autocast_cache()

    def applied(self) -> torch.autocast:
        """Return a context that applies the setting and shares casts with code outside."""
        return torch.autocast(
            self.device_type,
            dtype=self.dtype,
            enabled=self.dtype is not None,
            cache_enabled=self.keeps_casts,
        )

    def is_now(self) -> bool:
        """Return whether this is the present setting."""
        if self.dtype is None:
            is_any = torch._C._is_any_autocast_enabled()  # the fastest check
            return not (is_any and torch.is_autocast_enabled(self.device_type))
        return (
            torch.is_autocast_enabled(self.device_type)
            and torch.get_autocast_dtype(self.device_type) is self.dtype
            and torch.is_autocast_cache_enabled() is self.keeps_casts
        )

    def __str__(self) -> str:
        if self.dtype is None:
            return "off"
        return f"{self.dtype} on {self.device_type}{'' if self.keeps_casts else ', no cache'}"
