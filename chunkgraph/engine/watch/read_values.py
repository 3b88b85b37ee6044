"""Compare the values that the Python code of forwards reads from outside of its arguments.

A replay runs no Python: it would keep a captured factor that is a global variable, a closure's
variable, or a part of a list, a dict or a configuration object. The code of forwards, and of their
own functions and methods, says which names it reads.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from chunkgraph._text import shown
from chunkgraph.engine.plain_values import Same
from chunkgraph.errors import ReplayMismatchError

__all__ = ["ReadValues"]

_LIBRARIES = frozenset({"chunkgraph", "megatron", "numpy", "torch", "transformer_engine"})
_LIBRARIES |= sys.stdlib_module_names - {"__main__"}
_SCALARS = (bool, int, str, bytes, types.NoneType, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_OF_MODULES = frozenset({*vars(nn.Module()), "training"})
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_STORES = frozenset({"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"})
_ITEM_STORES = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR"})
_MUTATORS = frozenset(
    {
        *("add", "append", "clear", "discard", "extend", "insert"),
        *("pop", "popitem", "remove", "setdefault", "update"),
    }
)
"""Methods that change a container."""
_MAX_DEPTH = 4
_MAX_PARTS = 1000
_CODE = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(property, classmethod, staticmethod),
)
_UNSET = object()
_NOTHING: dict[str, Any] = {}


@dataclass(frozen=True)
class _Names:
    """The names in the code of one function.

    Attributes:
        globals: Global variables that it reads and does not change.
        attributes: Attributes that it reads and does not change.
        changed: Names of what it changes itself.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    changed: frozenset[str]


@dataclass
class _Key:
    """A value at one time, equal to another one of the same types and bits.

    Attributes:
        kind: Type of the value.
        value: The value, or `Same` for one that is compared by identity; None for containers.
        parts: Keys of items and attributes, by their text.
    """

    kind: type
    value: Any
    parts: dict[str, _Key] = field(default_factory=dict)

    def __str__(self) -> str:
        value = self.value.value if isinstance(self.value, Same) else self.value
        if isinstance(value, torch.Tensor):
            return f"a tensor of shape {tuple(value.shape)}"
        if self.parts and value is None:
            return f"a {self.kind.__name__} of {len(self.parts)} values"
        return str(value) if self.kind in (float, complex) else shown(value)


@dataclass
class _Pass:
    """One comparison of all places.

    Attributes:
        objects: Keys of objects so far, which many layers may share.
        num_parts: Parts of the present place so far.
    """

    objects: dict[tuple[int, int, int, bool], _Key] = field(default_factory=dict)
    num_parts: int = 0


@dataclass(frozen=True)
class _Place:
    """A value that a function reads.

    Attributes:
        text: Name for errors.
        read: Returns the value.
        attributes: Names of attributes that the function reads from objects.
        has_tensors: Whether tensors in it count.
    """

    text: str
    read: Callable[[], Any]
    attributes: frozenset[str]
    has_tensors: bool

    def key(self, present: _Pass) -> _Key:
        """Return a key of the present value."""
        present.num_parts = 0
        return self._key(self.read(), 0, present)

    def _key(self, value: Any, depth: int, present: _Pass) -> _Key:
        kind = type(value)
        if kind in _SCALARS:
            return _Key(kind, value)
        if kind is float or kind is complex:
            return _Key(kind, repr(value))  # NaN is equal to itself, -0.0 is not 0.0
        if isinstance(value, (set, frozenset)):
            return _Key(kind, frozenset(value) if len(value) <= _MAX_PARTS else Same(value))
        is_container = isinstance(value, _CONTAINERS)
        if is_container:
            present.num_parts += len(value)
        if depth == _MAX_DEPTH or present.num_parts > _MAX_PARTS:
            return _Key(kind, Same(value))
        place = (id(value), id(self.attributes), depth, self.has_tensors)
        if not is_container and place in present.objects:
            return present.objects[place]
        parts: dict[str, Any] = {}
        if isinstance(value, dict):
            parts = {f"[{name!r}]": part for name, part in value.items()}
        elif is_container:
            parts = {f"[{i}]": part for i, part in enumerate(value)}
        elif _has_attributes(value):
            parts = {f".{name}": _attribute(value, name) for name in self.attributes}
        keys = {
            name: self._key(part, depth + 1, present)
            for name, part in parts.items()
            if part is not _UNSET and (self.has_tensors or not isinstance(part, torch.Tensor))
        }
        key = _Key(kind, None if is_container else Same(value), keys)
        if not is_container:
            present.objects[place] = key
        return key


class ReadValues:
    """Values that the forwards of a chunk read from globals, closures and objects.

    Layers, functions, tensors and modules of libraries count as the same object; containers and
    other objects by their parts that the code names. Plain attributes are those of `LayerSettings`,
    tensors in them those of `OutsideTensors`.

    Args:
        label: Label of the chunk.
        layers: Each layer with its name.
        function: A chunk's function; None if a layer is called.
    """

    def __init__(
        self,
        label: str,
        layers: Iterable[tuple[str, nn.Module]],
        function: Callable[..., Any] | None = None,
    ) -> None:
        self._label = label
        self._places: dict[tuple[int, str], _Place] = {}
        self._seen: set[tuple[int, int]] = set()
        for path, layer in layers:
            forward = vars(layer).get("forward", getattr(type(layer), "forward", None))
            self._visit(forward, layer, path)
        if function is not None:
            self._visit(function, None, "")
        self._keys = self._keys_now()

    def check(self) -> None:
        """Compare all values.

        Raises:
            ReplayMismatchError: One has changed since the capture.
        """
        keys = self._keys_now()
        if keys == self._keys:
            return
        changes = [
            change
            for place, captured, now in zip(self._places.values(), self._keys, keys, strict=True)
            for change in _changes(place.text, captured, now)
        ]
        raise ReplayMismatchError(
            f"{self._label}: {', '.join(changes)} was changed after capture, and the forward "
            "reads it; a replay would ignore this. Pass it as an argument, release the graphs and "
            "capture again, or ask for an eager step (`step(eager=True)`)."
        )

    def _keys_now(self) -> list[_Key]:
        present = _Pass()
        return [place.key(present) for place in self._places.values()]

    def _visit(self, function: Any, layer: nn.Module | None, path: str) -> None:
        """Add what a function reads, and the functions that it calls."""
        function = getattr(function, "__func__", function)
        if not _is_own(function) or (id(function.__code__), id(layer)) in self._seen:
            return
        self._seen.add((id(function.__code__), id(layer)))
        names, variables = _names_in(function.__code__), function.__globals__
        for name in names.globals & variables.keys():
            self._add(f"the global {name}", variables, name, names)
            for called in _functions_of(variables[name], names.attributes):
                self._visit(called, None, "")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            with suppress(ValueError):  # a variable that is not set yet
                for called in _functions_of(cell.cell_contents, names.attributes):
                    self._visit(called, None, "")
                if name != "__class__" and name not in names.changed:
                    self._add(f"the variable {name}", cell, "cell_contents", names)
        if layer is not None:
            for name in names.attributes - _OF_MODULES:
                self._visit_attribute(name, names, layer, path)

    def _visit_attribute(self, name: str, names: _Names, layer: nn.Module, path: str) -> None:
        """Add an attribute of a layer or of its classes."""
        own = vars(layer)
        if name in own:
            if isinstance(own[name], _CONTAINERS) or _has_attributes(own[name]):
                self._add(f"{path}{path and '.'}{name}", layer, name, names)
            self._visit(own[name], layer, path)
            return
        for cls in type(layer).__mro__:
            value = vars(cls).get(name)
            self._visit(getattr(value, "fget", value), layer, path)
            if isinstance(value, (list, set, dict)):
                self._add(f"{cls.__name__}.{name}", cls, name, names)

    def _add(self, text: str, holder: Any, name: str, names: _Names) -> None:
        is_dict = isinstance(holder, dict)
        read = holder.get if is_dict else functools.partial(getattr, holder)
        known = self._places.get((id(holder), name))
        attributes = names.attributes if known is None else names.attributes | known.attributes
        self._places[id(holder), name] = _Place(
            text,
            functools.partial(read, name, _UNSET),
            attributes,
            has_tensors=not isinstance(holder, (nn.Module, type)),
        )


def _functions_of(value: Any, attributes: frozenset[str]) -> tuple[Any, ...]:
    """Return what code with this value may call: itself, and functions of an operator or module."""
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        return tuple(vars(value).values())
    if isinstance(value, types.ModuleType):
        return tuple(vars(value).get(name) for name in attributes)
    return (value,)


def _is_own(function: Any) -> bool:
    """Return whether ``function`` is Python code outside of the known libraries."""
    if not isinstance(function, types.FunctionType):
        return False
    return (function.__module__ or "").partition(".")[0] not in _LIBRARIES


@functools.cache
def _names_in(code: types.CodeType) -> _Names:
    """Return the names that a function reads, also in functions and loops inside of it."""
    every = [[*dis.get_instructions(part)] for part in _codes(code)]
    flat = [i for instructions in every for i in instructions]
    changed = {name for instructions in every for name in _changed_names(instructions)}
    return _Names(
        frozenset({i.argval for i in flat if i.opname in _GLOBAL} - changed),
        frozenset({i.argval for i in flat if i.opname in _ATTRIBUTE} - changed),
        frozenset(changed),
    )


def _changed_names(code: Sequence[dis.Instruction]) -> Iterator[str]:
    """Yield the names that code assigns, and those of containers that it changes."""
    for index, instruction in enumerate(code):
        if instruction.opname in _STORES:
            yield instruction.argval
        elif instruction.opname in _ATTRIBUTE and instruction.argval in _MUTATORS:
            yield from _name_at(code, index - 1)
        elif instruction.opname in _ITEM_STORES:
            if code[index - 1].opname == "SWAP":  # an augmented assignment
                yield from _name_at(code, index - 1)
                continue
            # The container lies on the stack below the index.
            owner, num_missing = index, 1
            while num_missing > 0 and owner > 0:
                owner -= 1
                i = code[owner]
                arg = i.arg if i.opcode >= dis.HAVE_ARGUMENT else None
                num_missing -= dis.stack_effect(i.opcode, arg, jump=False)
            yield from _name_at(code, owner - 1)


def _name_at(code: Sequence[dis.Instruction], index: int) -> Iterator[str]:
    """Yield the name that an instruction loads; those of its line if it computes something."""
    instruction = code[index]
    named = _GLOBAL | _ATTRIBUTE | {"LOAD_DEREF"}
    if instruction.opname in named:
        yield instruction.argval
    elif not instruction.opname.startswith("LOAD_"):
        line = instruction.positions and instruction.positions.lineno
        yield from (
            i.argval
            for i in code
            if i.opname in named and (i.positions and i.positions.lineno) == line
        )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _has_attributes(value: Any) -> bool:
    """Return whether ``value`` is an object or module that may hold settings."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] not in _LIBRARIES
    if isinstance(value, (torch.Tensor, nn.Module, types.FunctionType, types.MethodType)):
        return False
    kind = value if isinstance(value, type) else type(value)
    owner = kind.__module__.partition(".")[0]
    return owner not in _LIBRARIES or isinstance(value, types.SimpleNamespace)


def _changes(text: str, captured: _Key | None, now: _Key | None) -> Iterator[str]:
    """Yield the parts of a value that differ, with their captured values and their present ones."""
    if captured == now:
        return
    if (
        captured is None
        or now is None
        or not (captured.parts and captured.parts.keys() & now.parts)
    ):
        yield f"{text} (captured {captured or 'nothing'}, now {now or 'nothing'})"
        return
    for name in {**captured.parts, **now.parts}:
        yield from _changes(f"{text}{name}", captured.parts.get(name), now.parts.get(name))


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without a call of Python code; `_UNSET` for none, and for methods."""
    part = getattr(value, "__dict__", _NOTHING).get(name, _UNSET)
    if part is _UNSET:
        part = getattr(value if isinstance(value, type) else type(value), name, _UNSET)
        if isinstance(part, types.MemberDescriptorType):  # of `__slots__`
            return getattr(value, name, _UNSET)
    return _UNSET if isinstance(part, _CODE) else part
