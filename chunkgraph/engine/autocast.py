"""torch's automatic casting: a graph holds the operators as they were cast in its capture.

Inside a block of `torch.autocast` a leaf that trains is cast once: all operators that read it share
the cast, and its gradients are added up in the lower precision. Captures do the same, each with
casts of its own: a cast lies in the memory of the graph that made it, and is of the parameters as
they were at that graph's replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Autocast"]


@dataclass(frozen=True)
class Autocast:
    """What `torch.autocast` is set to on this thread, for one type of device.

    Attributes:
        device_type: for example ``cuda``.
        dtype: what is cast to; None: nothing is.
        keeps_casts: whether casts of leaves are shared (``cache_enabled``).
    """

    device_type: str
    dtype: torch.dtype | None
    keeps_casts: bool = False

    @staticmethod
    def now(device_type: str) -> Autocast:
        """As it is set."""
        if not torch.is_autocast_enabled(device_type):
            return Autocast(device_type, None)
        dtype = torch.get_autocast_dtype(device_type)
        return Autocast(device_type, dtype, torch.is_autocast_cache_enabled())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set it so in this block, which shares no casts with what is outside of it."""
        cast = torch.autocast(
            self.device_type,
            dtype=self.dtype,
            enabled=self.dtype is not None,
            cache_enabled=self.keeps_casts,
        )
        with cast:
            torch.clear_autocast_cache()
            try:
                yield
            finally:
                torch.clear_autocast_cache()

    def is_now(self) -> bool:
        """Whether it is still set so."""
        if self.dtype is None:
            is_any = torch._C._is_any_autocast_enabled()  # sooner answered
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
