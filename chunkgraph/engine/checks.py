"""Check, once a step and before its first launch, that the model is as it was captured.

A graph knows only addresses, and runs no Python. These checks find what training loops really do:
load a checkpoint into new tensors, freeze layers, forget ``train()``, add a profiler's hook. What
else a forward reads from Python must not change; see docs/contract.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from chunkgraph._text import shown
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.hooks import Error, refuse_hooks
from chunkgraph.engine.tree import new_guard
from chunkgraph.errors import CaptureError, ReplayMismatchError

_HOLDERS = itemgetter("_modules", "_parameters", "_buffers")
_END = object()
MOVED = "moved to other memory"
_MEMORY = "the memory of "
_OBJECTS = (nn.Module, torch.Tensor)
_PLAIN = (bool, float, str, tuple, type(None))
_SWITCHES = ("training", "_adapter_enabled", "_merged")  # also those of Megatron-Bridge
_OF_PEFT = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")


class ModelGuard:
    """What one chunk's graphs depend on.

    Args:
        chunk: the chunk; without a module only its parameters are known.

    Attributes:
        label: label of the chunk.
        parameters: trainable parameters of the chunk.

    Raises:
        CaptureError: replays would skip a hook or a wrapper.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.label, self.parameters = chunk.label, chunk.parameters
        self._module, self._caches = chunk.module, frozenset(chunk.caches)
        self.take()
        self.refuse_hooks(CaptureError)

    def take(self) -> None:
        """Record the present state: for `refuse_hooks`, and at the end of a session."""
        modules = self._module.named_modules() if self._module is not None else ()
        self._layers = {path or "the chunk": layer for path, layer in modules}
        held, layers = self._held_now(), self._layers.values()
        self._names = {t: name for name, t in held.items() if isinstance(t, torch.Tensor)}
        for i, p in enumerate(self.parameters):
            self._names.setdefault(p, f"parameter {i} of shape {tuple(p.shape)}")
        # The same facts as flat lists, which every step compares.
        self._tensors = [*self._names]
        self._graded = [p for p in self.parameters if hasattr(p, "main_grad")]
        holders = [*chain.from_iterable(map(_HOLDERS, map(vars, layers)))]
        # Eager calls may replace a cache, but nothing else that its layer holds.
        caching = [h for h in holders if self._caches & h.keys()]
        self._beside = [(h, k, v) for h in caching for k, v in h.items() if k not in self._caches]
        holders = [h for h in holders if not self._caches & h.keys()]
        # A new buffer changes nothing that a graph computes.
        self._empty = [h for own in map(vars, layers) for h in _HOLDERS(own)[:2] if not h]
        # Views show later entries too. A different number of them meets `_END` of the other side.
        self._values = [*(h.values() for h in holders if h), [_END]]
        self._objects = [*chain.from_iterable(self._values)]
        self._owners, self._keys = settings_of(layers)
        tensors = self._tensors_now()
        self._fits, self._layouts = new_guard(tensors), _layouts(tensors)
        # Adapters change their lists in place.
        self._others = tuple([*map(copy, values)] for values in self._others_now(tensors))
        self._facts = self._facts_now()

    def check(self) -> None:
        """Compare everything, when a step begins.

        Raises:
            ReplayMismatchError: something has changed since the capture.
        """
        if change := self.change():
            raise ReplayMismatchError(
                f"{self.label}: {change}; replays would ignore this. Undo it (update tensors in "
                "place, with copy_), ask for an eager step (`step(eager=True)`), or release the "
                "graphs and capture again."
            )

    def change(self) -> str:
        """Return what has changed since the capture, or ""."""
        return "" if self._is_as_captured() else self._change()

    def refuse_hooks(self, error: Error) -> None:
        """Raise ``error`` for hooks and wrappers that replays would skip."""
        # The owner of a main_grad does the work of its hooks.
        own = {self._names[p]: p for p in self.parameters if not hasattr(p, "main_grad")}
        refuse_hooks(self.label, self._layers, own, error)

    def _is_as_captured(self) -> bool:
        """Return whether all facts are those of the capture, at the least cost for the host."""
        tensors = self._tensors_now()
        return (
            all(map(is_, chain.from_iterable(self._values), self._objects))
            and not any(self._empty)
            and all(holder.get(key) is value for holder, key, value in self._beside)
            and self._others_now(tensors) == self._others
            and (self._fits(*tensors) or _layouts(tensors) == self._layouts)
        )

    def _held_now(self) -> dict[str, Any]:
        """Return parts and tensors by name, except caches that eager calls may replace."""
        return {
            f"{path}.{key}".removeprefix("the chunk."): value
            for path, layer in self._layers.items()
            for holder in _HOLDERS(vars(layer))
            for key, value in holder.items()
            if key not in self._caches
        }

    def _tensors_now(self) -> list[torch.Tensor]:
        if not self._graded:
            return self._tensors
        grads = [getattr(p, "main_grad", None) for p in self._graded]
        return [*self._tensors, *[grad for grad in grads if grad is not None]]

    def _others_now(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
        return (
            [*map(torch.Tensor.data_ptr, tensors)],
            [*map(dict.get, self._owners, self._keys)],
        )

    def _facts_now(self) -> dict[str, Any]:
        """Return all that is compared, by name: parts and tensors, then what is known of them."""
        facts = self._held_now()
        tensors: dict[str, Any] = {name: t for t, name in self._names.items()}
        for p in self.parameters:
            tensors[f"{self._names[p]}.main_grad"] = getattr(p, "main_grad", None)
        for name, t in tensors.items():
            facts[f"{_MEMORY}{name}"] = None if t is None else t.data_ptr()
            if t is not None:
                facts |= {f"{name}.stride()": t.stride(), f"{name}.shape": t.shape}
                facts[f"{name}.requires_grad"] = t.requires_grad
        for path, layer in self._layers.items():
            facts |= {f"{path}.{key}": copy(vars(layer).get(key)) for key in _settings(layer)}
        return facts

    def _change(self) -> str:
        """Describe the first fact that differs; "" if none does."""
        now = self._facts_now()
        for name in {**self._facts, **now}:
            old, new = self._facts.get(name), now.get(name)
            if old is new or (not isinstance(old, _OBJECTS) and old == new):
                continue
            is_place = name.startswith(_MEMORY)
            if is_place or isinstance(old, _OBJECTS) or isinstance(new, _OBJECTS):
                kind = "module" if isinstance(new, nn.Module) else "tensor"
                what = MOVED if is_place else f"replaced by another {kind}"
                what = "added" if old is None else "removed" if new is None else what
                return f"{name.removeprefix(_MEMORY)} was {what}"
            return f"{name} was {shown(old)} at the capture, and is {shown(new)} now"
        return ""


def _layouts(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(t.shape, t.stride(), t.requires_grad) for t in tensors]


def settings_of(layers: Iterable[nn.Module]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return, for each setting of layers that is compared, the dict that has it, and its key."""
    settings = [(vars(layer), key) for layer in layers for key in _settings(layer)]
    return [own for own, _ in settings], [key for _, key in settings]


def _settings(layer: nn.Module) -> list[str]:
    """Return the mode of a layer, settings of torch.nn's, such as ``p``, and of adapters."""
    is_torchs = type(layer).__module__.startswith("torch.nn.")
    declared = (*getattr(type(layer), "__constants__", ()), "dropout") if is_torchs else ()
    own = vars(layer)
    of_peft = _OF_PEFT if "_disable_adapters" in own else ()
    return [*of_peft, *(k for k in (*_SWITCHES, *declared) if isinstance(own.get(k, ...), _PLAIN))]
