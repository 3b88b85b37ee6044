"""The default random generator of the CPU, as one thread sees it during a capture session.

What a session draws is discarded, and the generator is shared by all threads of the process. So a
session does not draw from it and put it back, which would repeat what other threads drew meanwhile:
it draws from a copy. Calls such as `torch.get_rng_state` see the copy too, on that thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "PrivateDraws",
    "are_same",
    "draw_privately",
    "draws",
    "given_generator",
    "private_generator",
    "replaced",
    "states_put_back",
    "thread_generator",
    "unanswered",
]


class _ThreadLocal(threading.local):
    generator: torch.Generator | None = None
    access: Any = None  # what answers for the generator in a capture


_local = _ThreadLocal()
_lock = threading.Lock()
_replaced: dict[tuple[ModuleType, str], tuple[int, Any]] = {}


@contextmanager
def replaced(module: ModuleType, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of ``module`` in the block, once however many threads are in it.

    Args:
        module: of torch.
        name: of the attribute.
        make: gives the stand-in for the original; it must serve every thread.
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
    """Stands for the default generator in `torch.random`: a thread reaches what it draws from."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_local.access or thread_generator(), name)


def thread_generator() -> torch.Generator:
    """What this thread draws from by default."""
    return _local.generator or torch.default_generator


@contextmanager
def private_generator(access: Any = None) -> Iterator[None]:
    """Let this thread draw from a copy of its default generator, which stays as it is.

    Operators draw from the copy by `draw_privately`.

    Args:
        access: answers the calls of `torch.random` on this thread; None: the copy itself.
    """
    outer = (_local.generator, _local.access)
    generator = torch.Generator()
    generator.set_state(thread_generator().get_state())
    with replaced(torch.random, "default_generator", lambda _: _ThreadsGenerator()):
        _local.generator, _local.access = generator, access
        try:
            yield
        finally:
            _local.generator, _local.access = outer


@contextmanager
def unanswered() -> Iterator[None]:
    """In the block, calls of `torch.random` reach this thread's generator itself."""
    access, _local.access = _local.access, None
    try:
        yield
    finally:
        _local.access = access


@contextmanager
def states_put_back(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Put the states of ``generators`` back on exit."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def draw_privately(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func``; if it draws from the default generator, draw from this thread's copy."""
    generator = _local.generator
    if generator is None or not draws(func) or given_generator(args, kwargs) is not None:
        return func(*args, **kwargs)
    drawing = _with_generator(func)
    if drawing is not None:
        return drawing(*args, **{**kwargs, "generator": generator})
    # It takes no generator. Another thread that draws in these microseconds draws that again.
    default = torch.default_generator
    state = default.get_state()
    default.set_state(generator.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(default.get_state())
        default.set_state(state)


class PrivateDraws(TorchDispatchMode):
    """Sends every operator of this thread through `draw_privately`."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return draw_privately(func, args, kwargs or {})


def draws(func: OpOverload) -> bool:
    """Whether ``func`` draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def are_same(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether both are one generator, for which torch may make several Python objects."""
    return bool(one._cdata == other._cdata)  # type: ignore[attr-defined]


def given_generator(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that an operator is given, unless that is the default one."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator) and not are_same(value, torch.default_generator):
            return value
    return None


@functools.cache
def _with_generator(func: OpOverload) -> OpOverload | None:
    """``func`` itself or its overload that takes a generator by name; None: there is none."""
    name = func._overloadname
    packet = func.overloadpacket
    for candidate in (name, "generator" if name == "default" else f"{name}_generator"):
        if candidate in packet.overloads():
            overload = getattr(packet, candidate)
            if any(argument.name == "generator" for argument in overload._schema.arguments):
                return overload
    return None
