"""Refuse forwards that draw from the global random generators of Python and NumPy.

A replay runs no Python: it would repeat what the draw decided in the capture.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from chunkgraph.engine.chunk import Chunk
from chunkgraph.errors import CaptureError

__all__ = ["host_draws_refused"]

_State = tuple[str, Any, Callable[[Any], None]]
"""Name of a generator, its state, and the function that sets it."""


def host_draws_refused(chunk: Chunk) -> Chunk:
    """Return the chunk with a forward that raises `CaptureError` if it draws such numbers.

    The generators then have the states from before the forward. With other threads, which may draw
    meanwhile, it warns.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        before = list(_states())
        result = chunk.forward(*args, **kwargs)
        for (name, old, restore), (_, new, _) in zip(before, _states(), strict=False):
            if pickle.dumps(old) == pickle.dumps(new):
                continue
            message = (
                f"{chunk.label}: its forward draws random numbers of {name}. A replay runs no "
                "Python, so it would repeat what they decided in the capture. Draw them outside "
                "and pass them as an argument, or draw with torch."
            )
            if threading.active_count() > 1:  # another thread may have drawn them
                warnings.warn(f"{message} If another thread drew them, all is well.", stacklevel=2)
                continue
            restore(old)
            raise CaptureError(message)
        return result

    return replace(chunk, forward=forward)


def _states() -> Iterator[_State]:
    yield "Python's `random`", random.getstate(), random.setstate
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield "`numpy.random`", numpy.get_state(), numpy.set_state
