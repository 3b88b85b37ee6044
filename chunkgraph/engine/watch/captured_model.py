"""Check that a module is as it was captured: its parts, tensors, grad flags and modes.

A graph knows only addresses. Replays would silently ignore a layer, parameter or buffer that is
replaced, added or removed, a parameter that is frozen or unfrozen, and a layer that is put into
evaluation mode. They do not run hooks on parameters, and do not notice writes to a parameter
between a forward and its backward.

All of this is compared when a step begins and when it ends. Hooks that torch has not registered,
and a module's dicts that were replaced as a whole, are noticed when it ends. Calls notice changes
that are undone inside a step: see `Windows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import containers
from chunkgraph.engine.pool_memory import PoolMemory
from chunkgraph.engine.tensor_guard import new_guard
from chunkgraph.engine.watch.eager_gradients import foreign_hooks
from chunkgraph.engine.watch.holders import HOOK_DICTS, Holders, are_same
from chunkgraph.engine.watch.layer_settings import LayerSettings
from chunkgraph.engine.watch.other_modules import OtherModules
from chunkgraph.engine.watch.outside_tensors import OutsideTensors
from chunkgraph.engine.watch.read_values import ReadValues
from chunkgraph.engine.watch.registered_hooks import num_registered_hooks
from chunkgraph.engine.watch.surroundings import check_surroundings, saved_tensors_hooks
from chunkgraph.engine.watch.variables import variables_of
from chunkgraph.engine.watch.windows import Windows
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import Pool, storage_address

__all__ = ["CapturedModel"]

_REMEDY = (
    "replays would ignore this. Update tensors in place (copy_), or release the graphs and capture "
    "again."
)

_requires_grad = attrgetter("requires_grad")
_version = attrgetter("_version")
_shape = attrgetter("shape")
_address = torch.Tensor.data_ptr
_stride = torch.Tensor.stride
_training = itemgetter("training")
_modules = itemgetter("_modules")
_tensors = itemgetter("_parameters", "_buffers")
_values = methodcaller("values")


@dataclass(frozen=True)
class _Part:
    """A module, and its contents at the capture."""

    path: str
    module: nn.Module
    is_training: bool
    parts: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]

    @staticmethod
    def now(path: str, module: nn.Module) -> _Part:
        return _Part(
            path,
            module,
            module.training,
            dict(module._modules),
            dict(module._parameters),
            dict(module._buffers),
        )

    def places(self) -> tuple[tuple[dict[str, Any], dict[str, Any]], ...]:
        """Return (captured, present) dicts of submodules, of parameters and of buffers."""
        return (
            (self.parts, self.module._modules),
            (self.parameters, self.module._parameters),
            (self.buffers, self.module._buffers),
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the captured tensors with their names in the module."""
        for held in (self.parameters, self.buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    yield key, tensor


_hooks = itemgetter(*HOOK_DICTS)
_GLOBAL_HOOKS: list[dict[int, Any]] = [
    getattr(nn.modules.module, f"_global{name}") for name in HOOK_DICTS
]
_LIBRARIES = frozenset({"chunkgraph", "megatron", "torch", "transformer_engine"})
"""Libraries with known hooks, which come and go around steps."""


class CapturedModel:
    """The parts and tensors of one chunk's module at the capture.

    Args:
        chunk: The chunk before its capture. Without a module only its parameters are known.

    Attributes:
        label: Label of the chunk.
        parameters: Trainable parameters of the chunk.
        outside: Tensors outside of the module's state that the forward reads.
        variables: Other variables outside of the module that the code of its forward names.
        is_as_captured: Cheap comparison for every call; if it fails, call `check_call`.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.label = chunk.label
        self._name = chunk.module_name
        self._module = chunk.module
        self._caches = frozenset(chunk.caches)
        self._functions = (("its function", chunk.forward), *chunk.functions)
        self._may_leave_values = chunk.may_leave_values
        self.parameters = tuple(chunk.parameters)
        self.outside = OutsideTensors(chunk.label)
        self._take()

    def _take(self) -> None:
        """Record the present state."""
        modules = self._module.named_modules() if self._module is not None else ()
        self._parts = [_Part.now(path, module) for path, module in modules]
        # The same facts as plain lists, which every step iterates over.
        self._attributes = [vars(part.module) for part in self._parts]
        # The wrapper of `torch.compile` has the mode of what it wraps.
        self._with_mode = [own for own in self._attributes if "training" in own]
        self._modes = [*map(_training, self._with_mode)]
        self._children = [child for part in self._parts for child in part.parts.values()]
        self._tensors: list[torch.Tensor | None] = []
        named: dict[int, tuple[torch.Tensor, str]] = {}
        for part in self._parts:
            self._tensors += [*part.parameters.values(), *part.buffers.values()]
            for key, tensor in part.tensors():
                named.setdefault(id(tensor), (tensor, self._path(part.path, key)))
        for parameter in self.parameters:
            named.setdefault(id(parameter), (parameter, f"shape {tuple(parameter.shape)}"))
        self._known = [tensor for tensor, _ in named.values()]
        self._names = [name for _, name in named.values()]
        self._trains = [*map(_requires_grad, self._known)]
        self._addresses = [*map(_address, self._known)]
        self._layouts = self._layouts_now()
        self._fits: Callable[..., bool] | None = None  # compares them at once
        counted = [held for held in named.values() if _is_counted(held[0])]
        self._counted = [tensor for tensor, _ in counted]
        self._counted_names = [name for _, name in counted]
        self._versions = [*map(_version, self._counted)]
        module = self._module if self._module is not None else nn.Module().train()
        self.is_as_captured = Windows(module, self._caches).next_is_as_captured
        layers = [(self._path(part.path), part.module) for part in self._parts]
        # Megatron's layers read many objects, which its schedules change.
        code = ([], ()) if self._may_leave_values else (layers, self._functions)
        self.variables, others = variables_of(*code)
        self._read = ReadValues(self.label, self.variables)
        self._others = OtherModules(self.label, others)
        layers += others
        self._settings = LayerSettings(self.label, layers, only_torchs=self._may_leave_values)
        self._num_registered = num_registered_hooks()
        self._hooks = self._hooks_now()
        self._holders = self._holders_now()

    def refuse_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse hooks and wrappers that wait for gradients of ``parameters``; replays run none.

        Hooks on a parameter with a ``main_grad`` are exempt: its creator does their work (see
        `Chunk.after_backward`).

        Raises:
            CaptureError: There is such a hook or wrapper; the message names it.
        """
        for part in self._parts:
            if isinstance(part.module, nn.parallel.DistributedDataParallel):
                raise CaptureError(
                    f"{self.label}: {part.path or 'the chunk'} is a torch "
                    "DistributedDataParallel, which does not see the gradients of replays and "
                    "would never reduce them. Pass ChunkGraphs the module without the wrapper, and "
                    "reduce the gradients after the step."
                )
        hooked = {id(p) for p in parameters if not hasattr(p, "main_grad") and foreign_hooks(p)}
        if hooked:
            names = [n for t, n in zip(self._known, self._names, strict=True) if id(t) in hooked]
            raise CaptureError(
                f"{self.label}: hooks wait for the gradients of {len(hooked)} parameters "
                f"({', '.join(names[:3]) or 'not of its module'}{', ...' * (len(names) > 3)}), but "
                "a replay calls no hooks. Remove them, and do their work after the step or in "
                "Chunk.after_backward."
            )

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter for errors."""
        index = next(i for i, tensor in enumerate(self._known) if tensor is parameter)
        return self._names[index]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Restore tensors and parts of the module after a capture session.

        Raises:
            CaptureError: The forward replaced one of them, which a replay would not.
        """
        replaced: list[str] = []
        try:
            yield
        finally:
            for part in self._parts:
                for held, holder in part.places():
                    for key, value in held.items():
                        if key not in holder or holder[key] is not value:
                            replaced.append(self._path(part.path, key))
                            holder[key] = value
        if replaced:
            raise CaptureError(
                f"{self.label}: its forward replaces {', '.join(replaced)} by another tensor. A "
                "replay runs no Python, so every replay would start from the value of the "
                "capture. Update it in place (add_, copy_), or keep it out of the chunk."
            )
        self._take()

    def hold_outside_tensors(self, pools: Sequence[Pool]) -> None:
        """Hold tensors that the forward reads and that neither the module nor ``pools`` have."""
        state, memory = {0, *map(storage_address, self._known)}, PoolMemory(pools)
        places = containers(self._module, self._name) if self._module is not None else []
        self.outside.hold(places, lambda t: storage_address(t) in state or memory.holds(t))

    def check_call(self) -> None:
        """Compare all facts, at a call for which ``is_as_captured`` is False.

        Raises:
            ReplayMismatchError: The module has changed, hooks for saved tensors are active, or
                `check_surroundings` refuses the call.
        """
        if what := saved_tensors_hooks():
            raise ReplayMismatchError(f"{self.label} is called {what}")
        check_surroundings(self.label)
        self.check()
        if self._module is not None and self._module.training is not self._modes[0]:
            raise self._other_mode("", self._module)

    def check_memory(self) -> None:
        """Compare the addresses of all tensors, which replays read.

        Raises:
            ReplayMismatchError: A tensor was moved since the capture.
        """
        if [*map(_address, self._known)] != self._addresses:
            self.check()

    def begin_step(self) -> None:
        """Compare what a caller may undo before the step ends, and count writes from now on.

        This runs after the first launch, and leaves out what `check_memory` and torch's count of
        hooks cover: the second replay waits for memory that it evicts from the CPU's caches.

        Raises:
            ReplayMismatchError: The module has changed since the capture.
        """
        number = num_registered_hooks()
        self._check_modules(may_have_new_hooks=number != self._num_registered)
        self._num_registered = number
        self._check_layouts()
        self._settings.check()
        self._read.check()
        self._others.check()
        self.outside.check()
        self.count_writes()

    def _hooks_now(self) -> dict[int, tuple[str, Any]]:
        """Return, by torch's number, each hook that runs with a part, and where it is."""
        places = [
            (self._path(part.path) or "the chunk", hooks)
            for part in self._parts
            for hooks in _hooks(vars(part.module))
        ]
        places += [("all modules", hooks) for hooks in _GLOBAL_HOOKS]
        return {n: (where, hook) for where, hooks in places for n, hook in (hooks or {}).items()}

    def _holders_now(self) -> Holders:
        return Holders([part.module for part in self._parts], _GLOBAL_HOOKS)

    def _check_hooks(self) -> None:
        then, now = self._hooks, self._hooks_now()
        nothing = ("", None)
        for number in {**then, **now}:
            (place, captured), (present_place, hook) = (
                hooks.get(number, nothing) for hooks in (then, now)
            )
            if captured is hook or (_is_of_library(captured) and _is_of_library(hook)):
                continue
            what = f"removed from {place}" if hook is None else f"added to {present_place}"
            raise ReplayMismatchError(
                f"{self.label}: a hook was {what} after capture, and a replay runs no Python. Undo "
                "this, or release the graphs and capture again."
            )
        self._hooks = now

    def count_writes(self) -> None:
        """Accept all writes so far, since no microbatch was in flight."""
        self._versions = [*map(_version, self._counted)]

    def end_step(self) -> None:
        """Compare after a step.

        Raises:
            ReplayMismatchError: The module has changed, or a parameter was written in the step.
        """
        self.check()
        self._settings.check()
        self._read.check()
        self._others.check()
        if [*map(_version, self._counted)] == self._versions:
            return
        written = [
            name
            for name, tensor, version in zip(
                self._counted_names, self._counted, self._versions, strict=True
            )
            if tensor._version != version
        ]
        raise ReplayMismatchError(
            f"{self.label}: {_list(written)} was modified in place inside the step; microbatches "
            "in flight would mix old and new values. Modify it before or after the step, or with "
            "an optimizer while no microbatch is in flight."
        )

    def check(self) -> None:
        """Compare everything except version counters.

        Raises:
            ReplayMismatchError: A part or a tensor was replaced, added, removed, moved, frozen or
                unfrozen, a hook was added or removed, or a part of the module changed between
                training and evaluation mode.
        """
        if not self._holders.are_in_use():
            self._check_holders()
        self._check_modules(may_have_new_hooks=True)
        self._check_layouts()
        if [*map(_address, self._known)] != self._addresses:
            raise self._moved()

    def _check_modules(self, *, may_have_new_hooks: bool) -> None:
        modes = [*map(_training, self._with_mode)]
        if modes != self._modes and modes[0] is self._modes[0]:
            part = next(p for p in self._parts if p.module.training is not p.is_training)
            raise self._other_mode(part.path, part.module)
        if not self._holders.are_unchanged(may_have_new_hooks=may_have_new_hooks):
            self._check_holders()

    def _check_layouts(self) -> None:
        if not self._are_alike():
            if [*map(_requires_grad, self._known)] != self._trains:
                raise self._mismatch(self._other_grad_flags())
            raise self._moved()

    def _check_holders(self) -> None:
        """Compare parts, tensors and hooks one by one."""
        if replaced := self._holders.replaced_attributes():
            path = next(part.path for part in self._parts if part.module is replaced[0])
            where = self._path(path) or "the chunk"
            raise self._mismatch(f"the __dict__ of {where} was replaced after capture")
        if not are_same(self._children_now(), self._children):
            raise self._mismatch(self._other_parts())
        if not are_same(self._tensors_now(), self._tensors):
            if other := self._other_tensors():
                raise self._mismatch(other)
            # Expect the new caches from now on; the graphs keep using the old ones.
            self._tensors = self._tensors_now()
        self._check_hooks()
        self._holders = self._holders_now()

    def _children_now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(_values, map(_modules, self._attributes)))]

    def _tensors_now(self) -> list[torch.Tensor | None]:
        holders = chain.from_iterable(map(_tensors, self._attributes))
        return [*chain.from_iterable(map(_values, holders))]

    def _are_alike(self) -> bool:
        """Return whether all tensors have the captured shapes, strides and ``requires_grad``."""
        if self._fits is not None and self._fits(*self._known):
            return True
        if [*map(_requires_grad, self._known)] != self._trains:
            return False
        if self._layouts_now() != self._layouts:
            return False
        if self._fits is None:
            self._fits = new_guard(self._known)
        return True

    def _layouts_now(self) -> list[tuple[tuple[int, ...], torch.Size]]:
        return [*zip(map(_stride, self._known), map(_shape, self._known), strict=True)]

    def _other_mode(self, path: str, module: nn.Module) -> ReplayMismatchError:
        name = f"{path} of {self.label}" if path else self.label
        now, then = ("train()", "eval()") if module.training else ("eval()", "train()")
        return ReplayMismatchError(
            f"{name} is called in {now}, but was captured in {then}; the graphs would run it as "
            "it was captured. Ask for an eager step (`step(eager=True)`), or release the graphs "
            "and capture again."
        )

    def _moved(self) -> ReplayMismatchError:
        places = zip(
            self._names,
            zip(self._addresses, self._layouts, strict=True),
            zip(map(_address, self._known), self._layouts_now(), strict=True),
            strict=True,
        )
        moved = [name for name, captured, now in places if captured != now]
        return ReplayMismatchError(
            f"{self.label}: {_list(moved)} was moved to other memory or changed its layout after "
            "capture; the graphs would read the old memory. Update it in place (copy_), or release "
            "the graphs and capture again."
        )

    def _other_parts(self) -> str:
        for part in self._parts:
            difference = _first_difference(part.parts, part.module._modules, "module")
            if difference is not None:
                key, what = difference
                return f"{self._path(part.path, key)} {what}"
        return "the layers of a module were reordered after capture"

    def _other_tensors(self) -> str:
        """Return the first tensor that was replaced, added or removed; "" if only caches were."""
        for part in self._parts:
            for held, holder in part.places()[1:]:
                caches = self._caches if held is part.buffers else frozenset[str]()
                difference = _first_difference(held, holder, "tensor", caches)
                if difference is not None:
                    key, what = difference
                    return f"{self._path(part.path, key)} {what}"
        return ""

    def _other_grad_flags(self) -> str:
        index = next(i for i, t in enumerate(self._known) if t.requires_grad is not self._trains[i])
        if self._trains[index]:
            return f"{self._names[index]} trained when it was captured, and is frozen now"
        return f"{self._names[index]} was frozen when it was captured, and trains now"

    def _mismatch(self, what: str) -> ReplayMismatchError:
        return ReplayMismatchError(f"{self.label}: {what}; {_REMEDY}")

    def _path(self, *path: str) -> str:
        return ".".join(part for part in (self._name, *path) if part)


def _first_difference(
    held: dict[str, Any], holder: dict[str, Any], kind: str, caches: frozenset[str] = frozenset()
) -> tuple[str, str] | None:
    """Return (key, description) of the first value that was removed, replaced or added, or None."""
    for key, value in held.items():
        now = holder.get(key)
        if now is not value and key not in caches:
            if now is None:
                return key, "was removed after capture"
            return key, f"was replaced by another {kind} after capture"
    added = next((key for key in holder if key not in held), None)
    return None if added is None else (added, "was added after capture")


def _is_counted(tensor: torch.Tensor) -> bool:
    """Return whether a write to a tensor between a forward and its backward must be a mistake."""
    return isinstance(tensor, nn.Parameter) and not tensor.is_inference()


def _is_of_library(hook: Any) -> bool:
    """Return whether one of `_LIBRARIES` has registered a hook; True for None."""
    owner = getattr(hook, "__module__", None) or ""
    return hook is None or owner.partition(".")[0] in _LIBRARIES


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
