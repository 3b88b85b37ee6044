"""Pause Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable automatic garbage collection in this block; `gc.collect` still works.

    A CUDA graph or event that is collected during a capture makes the capture invalid. Imports of
    torch and Megatron leave next to nothing to collect, but walking over all modules again and
    again as they grow takes about a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
