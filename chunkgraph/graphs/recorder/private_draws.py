"""Draw from a private copy of the CPU's default generator, in sessions of the recorder."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode_temporarily,
)

from chunkgraph.graphs.operators import draws, explicit_generator
from chunkgraph.graphs.random_state import private_copy

__all__ = ["PrivateDraws", "draw_privately", "without_private_draws"]


def draw_privately(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func``; if it draws from the default generator, draw from this thread's copy."""
    generator = private_copy()
    if generator is None or not draws(func) or explicit_generator(args, kwargs) is not None:
        return func(*args, **kwargs)
    drawing = _with_generator(func)
    if drawing is not None:
        return drawing(*args, **{**kwargs, "generator": generator})
    # The operator takes no generator. Draws of other threads in these microseconds repeat.
    default = torch.default_generator
    state = default.get_state()
    default.set_state(generator.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(default.get_state())
        default.set_state(state)


class PrivateDraws(TorchDispatchMode):
    """Send every operator of this thread through `draw_privately`."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return draw_privately(func, args, kwargs or {})


@contextmanager
def without_private_draws() -> Iterator[None]:
    """Suspend `PrivateDraws`, if it is on, for work that draws privately itself."""
    modes = _get_current_dispatch_mode_stack()
    index = next((i for i, mode in enumerate(modes) if isinstance(mode, PrivateDraws)), None)
    if index is None:
        yield
        return
    with ExitStack() as stack:
        for _ in modes[index:]:
            stack.enter_context(_pop_mode_temporarily())
        for mode in modes[index + 1 :]:
            stack.enter_context(mode)
        yield


@functools.cache
def _with_generator(func: OpOverload) -> OpOverload | None:
    """Return ``func`` or its overload that takes a generator by name; None if there is none."""
    name = func._overloadname
    packet = func.overloadpacket
    for candidate in (name, "generator" if name == "default" else f"{name}_generator"):
        if candidate in packet.overloads():
            overload = getattr(packet, candidate)
            if any(argument.name == "generator" for argument in overload._schema.arguments):
                return overload
    return None
