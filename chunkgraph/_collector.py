"""Python's garbage collector, held back for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing is collected inside, unless it is asked for.

    For captures, in which a CUDA graph or an event that is collected makes the capture invalid; and
    for the imports of torch and Megatron, which leave next to nothing to collect, while walking
    over all modules again and again as they grow takes about a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
