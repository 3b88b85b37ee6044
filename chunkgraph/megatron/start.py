"""The first seconds of a rank, in which it imports torch and Megatron."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """Import here: the garbage collector waits.

    It would walk over all modules again and again as they grow, which takes about a second, and
    imports leave next to nothing to collect.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
