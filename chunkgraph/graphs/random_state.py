"""Random states while graphs are captured: preserve them, refuse what a replay cannot set."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.errors import IllegalOperationError
from chunkgraph.graphs.failure import illegal_operation

_MARK = "_chunkgraph_position"


class _ThreadLocal(threading.local):
    generator: CapturedGenerator | None = None


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
    """Replace the default generator in `torch.random` by that of the calling thread's capture."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_local.generator or torch.default_generator, name)


@contextmanager
def answering_calls(generator: CapturedGenerator) -> Iterator[None]:
    """Let ``generator`` answer this thread's calls of `torch.random`, as `torch.manual_seed`."""
    with patched(torch.random, "default_generator", lambda _: _ThreadsGenerator()):
        _local.generator = generator
        try:
            yield
        finally:
            _local.generator = None


@contextmanager
def answering_device_calls(generator: CapturedGenerator) -> Iterator[None]:
    """Let ``generator`` answer `torch.cuda.get_rng_state` and ``set_rng_state`` in a capture.

    Recomputation calls them in the backward, which runs in a thread of autograd.
    """

    def getting(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not torch.cuda.is_current_stream_capturing():
                return original(*args, **kwargs)
            # An empty state: code outside of the capture cannot set it.
            with _disable_current_modes():
                return generator.marked(torch.empty(0, dtype=torch.uint8, device="cpu"))

        return get_rng_state

    def setting(original: Callable[..., None]) -> Callable[..., None]:
        def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if torch.cuda.is_current_stream_capturing():
                generator.set_state(new_state)
            else:
                original(new_state, *args, **kwargs)

        return set_rng_state

    with (
        patched(torch.cuda, "get_rng_state", getting),
        patched(torch.cuda, "set_rng_state", setting),
    ):
        yield


class CapturedGenerator:
    """Replace a device's default generator in a capture, and refuse what a replay cannot repeat.

    A replay draws from the state that the generator has at that time. Activation checkpoints save
    the state in one graph, set it in another, and put the current one back. This is legal if the
    work draws nothing in between. Seeds and states from elsewhere are refused.

    Args:
        label: Name of the graph in errors.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._num_draws = 0
        self._is_elsewhere = False  # another state than the current one is set

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def get_state(self) -> torch.Tensor:
        """Return the state, which `set_state` accepts in this and other captures."""
        return self.marked(torch.default_generator.get_state())

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        """Accept a state that `get_state` returned in a capture.

        Raises:
            IllegalOperationError: The state comes from elsewhere.
        """
        mark = getattr(state, _MARK, None)
        if mark is None:
            raise self._refused("torch.set_rng_state")
        self._is_elsewhere = mark != (self, self._num_draws, False)
        return torch.default_generator

    def marked(self, state: torch.Tensor) -> torch.Tensor:
        """Return ``state``, which from now on stands for the current one."""
        setattr(state, _MARK, (self, self._num_draws, self._is_elsewhere))
        return state

    def draw(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Count a draw of ``func`` if it uses the default generator.

        Raises:
            IllegalOperationError: The work draws again after it has set an earlier state.
        """
        if not draws(func) or explicit_generator(args, kwargs) is not None:
            return
        if _draws_nothing(func, args, kwargs):
            return
        if self._is_elsewhere:
            raise illegal_operation(
                str(func),
                "draws random numbers in a recomputation, which a replay cannot repeat",
                self._label,
                "set the dropout of what is recomputed to 0, or do not recompute it.",
            )
        self._num_draws += 1

    def finish(self) -> None:
        """Check the end of the captured work.

        Raises:
            IllegalOperationError: A state that the work has set is not put back.
        """
        if self._is_elsewhere:
            raise self._refused("torch.set_rng_state")

    def manual_seed(self, _seed: int) -> torch.Generator:
        """Raise IllegalOperationError."""
        raise self._refused("torch.manual_seed")

    def seed(self) -> int:
        """Raise IllegalOperationError."""
        raise self._refused("torch.seed")

    def _refused(self, what: str) -> IllegalOperationError:
        return illegal_operation(
            what, "sets the random state, which a replay would not repeat", self._label
        )


def _draws_nothing(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` is attention or dropout with a probability of 0, or in evaluation."""
    arguments = func._schema.arguments
    values = {a.name: a.default_value for a in arguments}
    values |= {a.name: v for a, v in zip(arguments, args, strict=False)} | kwargs
    if func is torch.ops.aten.native_dropout.default:
        return values["train"] is False
    return values.get("dropout_p") == 0.0


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
