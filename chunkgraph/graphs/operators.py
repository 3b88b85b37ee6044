"""See, describe and watch the operators that eager code runs."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """Pass every operator inside the mode to `run_operator`, one call for a compiled part."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled parts stay compiled."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.run_operator(func, args, kwargs or {})

    @abstractmethod
    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` and return its result."""


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors of an operator's arguments or result, nested in lists and tuples."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors.extend(tensors_in(*value))
    return tensors


def replace_leaves(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Return an operator's arguments with ``replace`` applied to every leaf of type ``kind``."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {name: replace_leaves(item, kind, replace) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([replace_leaves(item, kind, replace) for item in value])
    return value


def storages_written(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the arguments that ``func`` writes, by its schema; all arguments of a collective.

    Running statistics of batch normalization, which its schemas do not mark, are included.
    """
    written: list[torch.Tensor] = []
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        written.extend(tensors_in(value))
    return written


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage; 0 if it has no memory itself.

    Sparse tensors, wrappers (``DTensor``) and meta tensors have none.
    """
    try:
        storage = tensor.untyped_storage()
        # Torch warns if the address of a compiler's tensor is read.
        return storage.data_ptr() if storage.device.type != "meta" else 0
    except (RuntimeError, ValueError):
        return 0


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the position and name of each written argument."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if is_collective(func)
        or (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in ("running_mean", "running_var")
    )


# Cached, since torch creates schema objects per access.
@functools.cache
def is_collective(func: OpOverload) -> bool:
    """Return whether ``func`` is a collective of a process group."""
    return func.namespace == "c10d"


@functools.cache
def computes_nothing(func: OpOverload) -> bool:
    """Return whether ``func`` returns memory with undefined contents."""
    return func._schema.name.startswith(("aten::empty", "aten::new_empty"))


def wait_for_work(out: Any) -> Any:
    """Wait for a collective's work; return its result with finished work instead."""

    def finish(work: torch.ScriptObject) -> torch.ScriptObject:
        c10d = torch._C._distributed_c10d
        c10d.Work.unbox(work).wait()
        return c10d.FakeWork().boxed()

    return replace_leaves(out, torch.ScriptObject, finish)


def run_to_its_end(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; a collective of CPU tensors until it has ended.

    Gloo ends some collectives (reduce-scatter) with operators of the thread that waits, which would
    be seen as operators of its caller. CUDA's collectives run none there, and overlap with others.
    """
    out = func(*args, **kwargs)
    if is_collective(func) and all(t.is_cpu for t in tensors_in(*args, *kwargs.values())):
        return wait_for_work(out)
    return out
