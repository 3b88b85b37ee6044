"""Check, once a step and before its first launch, that the model is as it was captured.

A graph knows only addresses, and runs no Python. These checks find what training loops really do:
load a checkpoint into new tensors, freeze layers, forget ``train()``, add a profiler's hook. What
else a forward reads from Python must not change; see docs/contract.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.hooks import Error, active_modes, refuse_hooks
from chunkgraph.engine.tensor_guard import new_guard
from chunkgraph.errors import CaptureError, ReplayMismatchError

__all__ = ["ModelGuard"]

_PARTS = itemgetter("_modules", "_parameters", "_buffers")
_FACTS = (
    *("was replaced, added or removed", "was moved to other memory", "has other strides"),
    *("was frozen or unfrozen", "was put into another mode (train, eval)"),
    *("has its main_grad in other memory, or none", "was changed"),
)
_address, _stride, _training = torch.Tensor.data_ptr, torch.Tensor.stride, itemgetter("training")
_requires_grad = attrgetter("requires_grad")


class ModelGuard:
    """What one chunk's graphs depend on.

    Args:
        chunk: the chunk; without a module only its parameters are known.

    Attributes:
        label: label of the chunk.
        parameters: trainable parameters of the chunk.
        modes: see `refuse_contexts`.

    Raises:
        CaptureError: replays would skip a hook or a wrapper.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.label, self.parameters, self._caches = chunk.label, chunk.parameters, chunk.caches
        modules = chunk.module.named_modules() if chunk.module is not None else ()
        self._modules = {path or "the chunk": module for path, module in modules}
        self.modes = active_modes()
        self.refuse_hooks(CaptureError)
        self.take()

    def take(self) -> None:
        """Record the present state, at the end of a session."""
        self._dicts = [*chain.from_iterable(_PARTS(vars(m)) for m in self._modules.values())]
        self._objects = self._objects_now()  # held, so that no other object gets their ids
        named: dict[int, tuple[str, torch.Tensor]] = {
            id(p): (f"shape {tuple(p.shape)}", p) for p in self.parameters
        }
        named |= {id(t): (name, t) for name, t in self._objects if isinstance(t, torch.Tensor)}
        names, self._tensors = [n for n, _ in named.values()], [t for _, t in named.values()]
        self._of_grads = [p for p in self.parameters if hasattr(p, "main_grad")]
        with_mode = {n: vars(m) for n, m in self._modules.items() if "training" in vars(m)}
        self._attributes = [*with_mode.values()]
        self._settings = [(n, vars(m), k) for n, m in self._modules.items() for k in _settings(m)]
        self._facts = self._facts_now()
        self._filled = [held for held in self._dicts if held]
        self._empty = [held for held in self._dicts if not held]
        self._values = [*chain.from_iterable(map(dict.values, self._filled))]
        self._fit = new_guard(self._tensors)
        self._names = [
            *([name for name, _ in self._objects], names, names, names, [*with_mode]),
            [named[id(p)][0] for p in self._of_grads],
            [f"{name}.{key}" for name, _, key in self._settings],
        ]

    def check(self) -> None:
        """Compare everything, when a step begins.

        Raises:
            ReplayMismatchError: something has changed since the capture.
        """
        if self._is_unchanged():
            return
        if (now := self._facts_now()) != self._facts:
            raise ReplayMismatchError(
                f"{self.label}: {self._change(now)} after the capture; replays would ignore this. "
                "Update tensors in place (copy_), release the graphs and capture again, or ask "
                "for an eager step (`step(eager=True)`)."
            )

    def refuse_hooks(self, error: Error) -> None:
        """Raise ``error`` for hooks and wrappers that replays would skip; see `refuse_hooks`."""
        refuse_hooks(self.label, self._modules, self.parameters, error)

    def _objects_now(self) -> list[tuple[str, Any]]:
        """Return parts and tensors with their names, except caches that eager calls replace."""
        return [
            (f"{path}.{key}".removeprefix("the chunk."), value)
            for path, module in self._modules.items()
            for held in _PARTS(vars(module))
            for key, value in held.items()
            if key not in self._caches
        ]

    def _facts_now(self) -> list[list[Any]]:
        tensors, objects = self._tensors, chain.from_iterable(map(dict.values, self._dicts))
        return [
            [*map(id, (o for _, o in self._objects_now()) if self._caches else objects)],
            [*map(_address, tensors)],
            [*map(_stride, tensors)],
            [*map(_requires_grad, tensors)],
            *self._cheap_facts(),
        ]

    def _cheap_facts(self) -> list[list[Any]]:
        return [
            [*map(_training, self._attributes)],
            [*map(_address_of_main_grad, self._of_grads)],
            [own.get(key) for _, own, key in self._settings],
        ]

    def _is_unchanged(self) -> bool:
        """Return whether all facts are those of the capture, at the least cost for the host."""
        values = [*chain.from_iterable(map(dict.values, self._filled))]
        _, addresses, _, _, *others = self._facts
        return (
            len(values) == len(self._values)
            and all(map(is_, values, self._values))
            and not any(self._empty)
            and [*map(_address, self._tensors)] == addresses
            and self._fit(*self._tensors)
            and self._cheap_facts() == others
        )

    def _change(self, now: Sequence[Sequence[Any]]) -> str:
        """Describe the first fact that differs."""
        for what, names, a, b in zip(_FACTS, self._names, self._facts, now, strict=True):
            if len(a) != len(b):
                changed = {*names} ^ {name for name, _ in self._objects_now()}
                return f"{min(changed, default='a tensor')} {what}"
            for name, old, new in zip(names, a, b, strict=True):
                if old != new:
                    detail = f" from {old!r} to {new!r}" if a is self._facts[-1] else ""
                    return f"{name} {what}{detail}"
        raise AssertionError("nothing has changed")


def _settings(module: nn.Module) -> list[str]:
    """Return the names of the settings of a layer of torch.nn: ``p``, ``eps``, ``momentum``."""
    if not type(module).__module__.startswith("torch.nn."):
        return []
    own = ((k, v) for k, v in vars(module).items() if k != "training" and not k.startswith("_"))
    return [key for key, value in own if isinstance(value, (float, bool, str, type(None)))]


def _address_of_main_grad(parameter: nn.Parameter) -> int:
    main_grad = getattr(parameter, "main_grad", None)
    return 0 if main_grad is None else main_grad.data_ptr()
