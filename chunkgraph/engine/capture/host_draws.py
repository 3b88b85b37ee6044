"""Refuse forwards that draw from random generators of Python and NumPy, global or their own.

A replay runs no Python: it would repeat what the draw decided in the capture.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import containers
from chunkgraph.engine.watch.variables import Variable
from chunkgraph.errors import CaptureError

__all__ = ["host_draws_refused"]

_State = tuple[str, Any, Callable[[Any], None]]
"""Name of a generator, its state, and the function that sets it."""

_METHODS = (types.MethodType, types.BuiltinMethodType)


def host_draws_refused(chunk: Chunk, variables: Sequence[Variable]) -> Chunk:
    """Return the chunk with a forward that raises `CaptureError` if it draws such numbers.

    The generators then have the states from before the forward. With other threads, which may draw
    meanwhile, it warns.

    Args:
        chunk: The chunk, in whose module generators may lie.
        variables: Other places where they may lie.
    """
    places = containers(chunk.module, chunk.module_name) if chunk.module is not None else []
    values = [(c.name(key), value) for c in places for key, value in c.entries()]
    values += [(v.text, v.read()) for v in variables]
    values += [(name, value.__self__) for name, value in values if isinstance(value, _METHODS)]
    own = {id(value): (name, value) for name, value in values if _is_generator(value)}

    def states() -> Iterator[_State]:
        yield from _global_states()
        yield from (_state(name, generator) for name, generator in own.values())

    def forward(*args: Any, **kwargs: Any) -> Any:
        before = list(states())
        result = chunk.forward(*args, **kwargs)
        for (name, old, restore), (_, new, _) in zip(before, states(), strict=False):
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


def _global_states() -> Iterator[_State]:
    yield "Python's `random`", random.getstate(), random.setstate
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield "`numpy.random`", numpy.get_state(), numpy.set_state


def _is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy.random")
    kinds = (numpy.Generator, numpy.RandomState) if numpy is not None else ()
    return isinstance(value, (random.Random, *kinds)) and not isinstance(value, random.SystemRandom)


def _state(name: str, generator: Any) -> _State:
    if isinstance(generator, random.Random):
        return name, generator.getstate(), generator.setstate
    if hasattr(generator, "get_state"):
        return name, generator.get_state(), generator.set_state
    bits = generator.bit_generator
    return name, bits.state, partial(setattr, bits, "state")
