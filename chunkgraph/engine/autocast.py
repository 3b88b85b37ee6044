"""torch's autocast: a graph holds the operators as they were cast in its capture.

Inside a `torch.autocast` block a trainable leaf is cast once: all operators that read it share the
cast, and its gradients are summed in the lower precision. A capture does the same, with casts of
its own: a cast lies in the memory of its graph and is computed in each replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch


class Autocast(NamedTuple):
    """The setting of `torch.autocast` on a thread, for one device type.

    Attributes:
        device_type: device type, for example ``cuda``.
        is_enabled: whether operators cast.
        dtype: dtype of casts; only compared while they are enabled.
        has_cache: whether casts of leaves are shared (``cache_enabled``); compared likewise.
    """

    device_type: str
    is_enabled: bool
    dtype: torch.dtype
    has_cache: bool

    @staticmethod
    def now(device_type: str) -> Autocast:
        """Return the present setting."""
        return Autocast(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the setting in this block, which shares no casts with code outside.

        Casts that the caller's autocast block has cached are lost.
        """
        block = torch.autocast(
            self.device_type, self.dtype, self.is_enabled, cache_enabled=self.has_cache
        )
        torch.clear_autocast_cache()
        try:
            # Without need no block: blocks inside the forward would share their casts in it.
            with nullcontext() if self.is_now() else block:
                yield
        finally:
            torch.clear_autocast_cache()

    def is_now(self) -> bool:
        """Return whether operators cast now as under this setting."""
        if not self.is_enabled:
            return not torch.is_autocast_enabled(self.device_type)
        return Autocast.now(self.device_type) == self

    def __str__(self) -> str:
        if not self.is_enabled:
            return f"off ({self.device_type})"
        return f"on ({self.device_type}, {self.dtype}{'' if self.has_cache else ', no cache'})"
