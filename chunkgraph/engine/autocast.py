"""torch's autocast: a graph holds the operators as they were cast in its capture.

Inside a `torch.autocast` block a trainable leaf is cast once: all operators that read it share the
cast, and its gradients are summed in the lower precision. The casts end with the outermost block,
which is either the caller's or inside the forward. Captures do the same, but each capture has its
own casts: a cast lies in the memory of its graph and is computed in each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Autocast", "ForwardCasts", "cast_check", "num_autocast_blocks"]


def num_autocast_blocks() -> int:
    """Return the number of `torch.autocast` blocks around the caller, on this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@dataclass(frozen=True)
class Autocast:
    """The setting of `torch.autocast` on a thread, for one device type.

    Attributes:
        device_type: device type, for example ``cuda``.
        is_enabled: whether operators cast.
        dtype: dtype of casts, also in blocks inside a forward that name none.
        has_cache: whether casts of leaves are shared (``cache_enabled``).
        is_inside: whether a block, enabled or not, is around the caller.
    """

    device_type: str
    is_enabled: bool
    dtype: torch.dtype
    has_cache: bool
    is_inside: bool

    @staticmethod
    def now(device_type: str) -> Autocast:
        """Return the present setting."""
        return Autocast(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
            num_autocast_blocks() > 0,
        )

    @property
    def keeps_casts(self) -> bool:
        """Return whether casts of leaves outlive a forward, so that several calls share them."""
        return self.has_cache and (self.is_enabled or self.is_inside)

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

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the setting in this block, which shares casts with code outside."""
        before, num_blocks = Autocast.now(self.device_type), num_autocast_blocks()
        self._set(int(self.is_inside))
        try:
            yield
        finally:
            before._set(num_blocks)

    def _set(self, num_blocks: int) -> None:
        """Make this the present setting, inside ``num_blocks`` blocks."""
        torch.set_autocast_enabled(self.device_type, self.is_enabled)
        torch.set_autocast_dtype(self.device_type, self.dtype)
        torch.set_autocast_cache_enabled(self.has_cache)
        # Not blocks of `torch.autocast`: one more would keep casts of blocks inside the forward.
        for _ in range(num_autocast_blocks(), num_blocks):
            torch.autocast_increment_nesting()
        for _ in range(num_blocks, num_autocast_blocks()):
            torch.autocast_decrement_nesting()

    def is_now(self) -> bool:
        """Return whether this is the present setting."""
        return (
            torch.is_autocast_enabled(self.device_type) is self.is_enabled
            and torch.get_autocast_dtype(self.device_type) is self.dtype
            and torch.is_autocast_cache_enabled() is self.has_cache
            and (num_autocast_blocks() > 0) is self.is_inside
        )

    def __str__(self) -> str:
        state = "on" if self.is_enabled else "off"
        place = "inside" if self.is_inside else "outside of"
        cache = "" if self.has_cache else ", no cache"
        return f"{state} ({self.device_type}, {self.dtype}, {place} a block{cache})"


def cast_check(captured: Autocast | None, *, has_blocks: bool) -> Callable[[], bool]:
    """Return a function that returns whether operators would cast otherwise now.

    Args:
        captured: the setting under which they were captured; None if unknown.
        has_blocks: whether they enter blocks themselves, which inherit the whole setting even where
            it is off.
    """
    if captured is None:
        return lambda: False
    if captured.is_enabled or has_blocks:
        return lambda: not captured.is_now()
    device_type, is_any_enabled = captured.device_type, torch._C._is_any_autocast_enabled
    return lambda: is_any_enabled() and torch.is_autocast_enabled(device_type)  # fastest first


@dataclass(frozen=True)
class ForwardCasts:
    """How a forward depends on autocast.

    Attributes:
        inputs: numbers of the inputs of which autocast caches a cast if they are leaves.
        has_blocks: whether the forward enters blocks itself.
    """

    inputs: tuple[int, ...] = ()
    has_blocks: bool = False
