"""Give one thread a private default random generator of the CPU during a capture session.

The draws of a session are discarded, and all threads of the process share the default generator. A
session that drew from it and restored it would repeat the draws of other threads. Instead, the
session draws from a copy. On its thread, calls such as `torch.get_rng_state` use the copy too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode_temporarily,
)

__all__ = [
    "PrivateDraws",
    "are_same",
    "draw_privately",
    "draws",
    "explicit_generator",
    "patched",
    "preserve_states",
    "private_generator",
    "thread_generator",
    "without_access",
    "without_private_draws",
]


class _ThreadLocal(threading.local):
    generator: torch.Generator | None = None
    access: Any = None  # handles calls of `torch.random` in a capture


_local = _ThreadLocal()
_lock = threading.Lock()
_replaced: dict[tuple[ModuleType, str], tuple[int, Any]] = {}


@contextmanager
def patched(module: ModuleType, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of ``module`` while any thread is inside the block.

    Args:
        module: A module of torch.
        name: Name of the attribute.
        make: Returns the replacement of the original; it must serve every thread.
    """
    with _lock:
        count, original = _replaced.get((module, name), (0, None))
        if count == 0:
            original = getattr(module, name)
            setattr(module, name, make(original))
        _replaced[module, name] = (count + 1, original)
    try:
        yield
    finally:
        with _lock:
            count, original = _replaced.pop((module, name))
            if count > 1:
                _replaced[module, name] = (count - 1, original)
            else:
                setattr(module, name, original)


class _ThreadsGenerator:
    """Replace the default generator in `torch.random` by the calling thread's generator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_local.access or thread_generator(), name)


def thread_generator() -> torch.Generator:
    """Return the generator that this thread draws from by default."""
    return _local.generator or torch.default_generator


@contextmanager
def private_generator(access: Any = None) -> Iterator[None]:
    """Make this thread draw from a copy of its default generator, which does not change.

    Operators draw from the copy through `draw_privately`.

    Args:
        access: Handles calls of `torch.random` on this thread; None for the copy itself.
    """
    outer = (_local.generator, _local.access)
    generator = torch.Generator()
    generator.set_state(thread_generator().get_state())
    with patched(torch.random, "default_generator", lambda _: _ThreadsGenerator()):
        _local.generator, _local.access = generator, access
        try:
            yield
        finally:
            _local.generator, _local.access = outer


@contextmanager
def without_access() -> Iterator[None]:
    """Make calls of `torch.random` reach this thread's generator directly."""
    access, _local.access = _local.access, None
    try:
        yield
    finally:
        _local.access = access


@contextmanager
def preserve_states(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Restore the states of ``generators`` on exit."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def draw_privately(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func``; if it draws from the default generator, draw from this thread's copy."""
    generator = _local.generator
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
def draws(func: OpOverload) -> bool:
    """Return whether ``func`` draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def are_same(one: torch.Generator, other: torch.Generator) -> bool:
    """Return whether both objects are the same generator; torch may create several objects."""
    return bool(one._cdata == other._cdata)  # type: ignore[attr-defined]


def explicit_generator(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """Return the generator among an operator's arguments, unless it is the default one."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator) and not are_same(value, torch.default_generator):
            return value
    return None


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
