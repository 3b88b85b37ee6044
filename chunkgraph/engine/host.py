"""`Host`: how the program around the chunks takes part in a capture session."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["Host"]


class Host:
    """The program around the chunks. Override the methods it needs; by default all do nothing."""

    def preserving(self) -> AbstractContextManager[object]:
        """Enclose a capture session or an eager pass of ``verify``; restore host-side state."""
        return nullcontext()

    def capturing(self) -> AbstractContextManager[object]:
        """Enclose capture warmup and captures. All ranks enter it together."""
        return nullcontext()

    def beside(self) -> AbstractContextManager[object]:
        """Enclose an eager pass that ``verify`` compares with a replay."""
        return nullcontext()

    def generators(self) -> Sequence[torch.Generator]:
        """Return the random generators that the chunks draw from, besides the default one."""
        return ()

    def progress(self, num_done: int, num_graphs: int, free_bytes: int | None) -> None:
        """Follow a session: called after every captured graph.

        Args:
            num_done: graphs captured so far.
            num_graphs: graphs of the session.
            free_bytes: bytes left on the device; None: unknown.
        """
