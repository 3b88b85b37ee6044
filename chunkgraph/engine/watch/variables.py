"""Find the variables outside of its arguments that the Python code of a forward names.

The code of forwards, and of their own functions and methods, says which global variables, variables
of closures, and attributes of objects and classes it reads, and which ones it changes.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from chunkgraph.engine.watch.holders import HOOK_DICTS

__all__ = [
    "CODE",
    "CONTAINERS",
    "UNSET",
    "Variable",
    "has_attributes",
    "is_small_array",
    "variables_of",
]

CONTAINERS = (list, tuple, set, frozenset, dict)
UNSET = object()
"""Value of a variable that is not set."""

_MAX_NUMBERS = 512
_MAX_ITEMS = 1000

_LIBRARIES = frozenset({"chunkgraph", "megatron", "numpy", "torch", "transformer_engine"})
_LIBRARIES |= sys.stdlib_module_names - {"__main__"}
_OF_MODULES = frozenset({*vars(nn.Module()), "training"})
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_NAMED = _GLOBAL | _ATTRIBUTE | {"LOAD_DEREF"}
_STORES = frozenset({"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"})
_ITEM_STORES = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR"})
_RETURNING_NONE = frozenset(
    {"add", "append", "clear", "discard", "extend", "insert", "remove", "update"}
)
_MUTATORS = _RETURNING_NONE | {"pop", "popitem", "setdefault"}
"""Methods that change a container."""
_OPERATORS = ("__call__", "__getitem__", "__iter__", "__next__", "__enter__", "__exit__")
"""Methods that code calls without their names."""
CODE = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(property, classmethod, staticmethod),
)


@dataclass(frozen=True)
class _Names:
    """The names in the code of one function.

    Attributes:
        globals: Global variables.
        attributes: Attributes.
        changed: Names of what it changes itself.
        used: Names of what it reads, unless only to change it, as counters and logs are.
        read: Attributes that it does not change.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    changed: frozenset[str]
    used: frozenset[str]
    read: frozenset[str]


_NO_NAMES = _Names(*[frozenset[str]()] * 5)


@dataclass(frozen=True)
class Variable:
    """A place outside of arguments that code reads or changes.

    Attributes:
        text: Name for errors.
        holder: The dict of globals, the cell of a closure, the object or the class that has it.
        name: Its key or attribute there.
        attributes: Names of attributes that the code reads from objects in it.
        has_tensors: Whether tensors in it count.
        is_changed: Whether all code that reads it also changes it.
        is_used: Whether any code reads it, not only to change it.
        used: Names of the parts that any code reads, not only to change them.
    """

    text: str
    holder: Any
    name: str
    attributes: frozenset[str]
    has_tensors: bool
    is_changed: bool
    is_used: bool
    used: frozenset[str]

    def read(self) -> Any:
        """Return the present value; `UNSET` if there is none."""
        if isinstance(self.holder, dict):
            return self.holder.get(self.name, UNSET)
        with suppress(ValueError):  # of an empty cell
            return getattr(self.holder, self.name, UNSET)
        return UNSET

    def write(self, value: Any) -> None:
        """Set the value; `UNSET` removes it."""
        if isinstance(self.holder, dict):
            self.holder.update({self.name: value})
            if value is UNSET:
                del self.holder[self.name]
        elif value is UNSET:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, value)


def variables_of(
    layers: Sequence[tuple[str, nn.Module]],
    functions: Iterable[tuple[str, Callable[..., Any]]] = (),
) -> tuple[tuple[Variable, ...], tuple[tuple[str, nn.Module], ...]]:
    """Return the variables that forwards and their hooks name, without plain attributes of layers.

    Args:
        layers: Each layer with its name, the module itself first.
        functions: Other functions or callable objects that a chunk calls, each with its name.

    Returns:
        The variables, and the layers of modules in them, each with its name.
    """
    code = _Code(layers)
    for path, layer in layers:
        code.visit_layer(layer, path)
    for name, function in functions:
        code.visit_callable(function, name)
    return tuple(code.variables.values()), tuple(code.modules.values())


class _Code:
    """Functions that forwards call, and the variables that they name.

    Args:
        layers: The layers of the chunk, with names, the module itself first.

    Attributes:
        variables: The variables, by identity of the holder and name.
        modules: Other layers, with names, by identity.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self.variables: dict[tuple[int, str], Variable] = {}
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        self._layers = {id(layer) for _, layer in layers}
        # A loss that is captured with a module lies next to it.
        self._roots = {id(layer) for path, layer in layers if path == layers[0][0]}
        self._seen: set[tuple[int, int]] = set()

    def visit(self, function: Any, owner: Any, path: str) -> None:
        """Add what a function names, and the functions that it calls.

        Args:
            function: The function; anything else is left alone.
            owner: The layer or object whose method it is, or None.
            path: Name of the owner.
        """
        if isinstance(function, (types.MethodType, classmethod, staticmethod)):
            function = function.__func__
        if not _is_own(function) or (id(function.__code__), id(owner)) in self._seen:
            return
        self._seen.add((id(function.__code__), id(owner)))
        names, variables = _names_in(function.__code__), function.__globals__
        for name in names.globals & variables.keys():
            self._add(f"the global {name}", variables, name, names)
            self._visit_value(variables[name], names, f"the global {name}")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            with suppress(ValueError):  # a variable that is not set yet
                self._visit_value(cell.cell_contents, names, f"the variable {name}")
                if name != "__class__":
                    self._add(f"the variable {name}", cell, "cell_contents", names, called=name)
        for name, value in _defaults(function):
            self._visit_value(value, names, f"the default {name}")
            self._add(
                f"the default {name}", {name: value}, name, replace(names, used=names.used | {name})
            )
        if owner is not None:
            of_modules = _OF_MODULES if isinstance(owner, nn.Module) else frozenset[str]()
            for name in names.attributes - of_modules:
                self._visit_attribute(name, names, owner, path)

    def visit_layer(self, layer: nn.Module, path: str) -> None:
        """Add what the forward of a layer names, and its hooks."""
        forward = vars(layer).get("forward", getattr(type(layer), "forward", None))
        self.visit(forward, layer, path)
        for name in HOOK_DICTS:
            for hook in (vars(layer).get(name) or {}).values():
                self.visit_callable(hook, f"a hook of {path or 'the chunk'}")

    def _visit_module(self, module: nn.Module, text: str) -> None:
        """Add the layers of a module that is not around the chunk's, without those known."""
        parts = {id(part): (path, part) for path, part in module.named_modules()}
        if id(module) in self._layers or not self._roots.isdisjoint(parts):
            return
        if any(isinstance(part, torch.jit.ScriptModule) for _, part in parts.values()):
            return  # whose state is not Python's
        named = [
            (f"{text}{path and '.'}{path}", part)
            for key, (path, part) in parts.items()
            if key not in self._layers and key not in self.modules
        ]
        self.modules.update((id(part), (path, part)) for path, part in named)
        for path, part in named:
            self.visit_layer(part, path)

    def visit_callable(self, value: Any, text: str) -> None:
        """Add what a call of ``value`` names."""
        self._visit_value(value, _NO_NAMES, text)

    def _visit_value(self, value: Any, names: _Names, text: str) -> None:
        """Add functions that code may call on a value, and attributes of classes it changes."""
        for called in _functions_of(value, names.attributes):
            self.visit(called, None, "")
        if isinstance(value, (list, tuple, dict)):
            items = value.values() if isinstance(value, dict) else value
            for item in islice(items, _MAX_ITEMS):
                if isinstance(item, nn.Module):
                    self._visit_module(item, text)
                elif isinstance(item, types.FunctionType):
                    self.visit(item, None, "")
        elif isinstance(value, nn.Module):
            self._visit_module(value, text)
        elif isinstance(value, types.FunctionType):
            for name in names.attributes & vars(value).keys() if _is_own(value) else ():
                self._add(f"{value.__name__}.{name}", value, name, names)
        elif isinstance(value, types.MethodType):
            self.visit(value, value.__self__, text)
            self._visit_value(value.__self__, names, text)
        elif isinstance(value, type) and has_attributes(value):
            for name in names.attributes:
                self.visit(vars(value).get(name), value, value.__name__)
            for name in names.changed:
                self._add_of_class(value, name, names)
        elif isinstance(value, types.ModuleType) and has_attributes(value):
            for name in names.changed & vars(value).keys():
                self._add(f"{text}.{name}", vars(value), name, names)
        elif has_attributes(value):
            for name in (*names.attributes, *_OPERATORS):
                self.visit(_of_class(value, name), value, text)
                self._add_slot(value, name, names, text)

    def _visit_attribute(self, name: str, names: _Names, owner: Any, path: str) -> None:
        """Add an attribute of a layer or object, or of its classes."""
        own = getattr(owner, "__dict__", {})
        text = f"{path}{path and '.'}{name}"
        if name in own:
            value = own[name]
            # Those of the chunk's layers that change are attributes that a session watches anyway.
            is_setting = id(owner) in self._layers or (
                id(owner) in self.modules and name not in names.changed
            )
            is_plain = not (
                isinstance(value, (*CONTAINERS, Iterator))
                or has_attributes(value)
                or is_small_array(value)
            )
            if not (is_setting and is_plain):
                self._add(text, owner, name, names)
            if not isinstance(value, types.MethodType):  # whose owner may be another object
                self.visit(value, owner, path)
            self._visit_value(value, names, text)
            return
        self.visit(_of_class(owner, name), owner, path)
        self._add_slot(owner, name, names, path)
        for cls in type(owner).__mro__:
            value = vars(cls).get(name)
            if isinstance(value, (list, set, dict)):
                self._add(f"{cls.__name__}.{name}", cls, name, names)
            elif name in names.changed and has_attributes(cls):
                self._add_of_class(cls, name, names)

    def _add_slot(self, owner: Any, name: str, names: _Names, path: str) -> None:
        if isinstance(_of_class(owner, name), types.MemberDescriptorType):
            self._add(f"{path}{path and '.'}{name}", owner, name, names)

    def _add_of_class(self, cls: type, name: str, names: _Names) -> None:
        if name in vars(cls) and not isinstance(vars(cls)[name], CODE):
            self._add(f"{cls.__name__}.{name}", cls, name, names)

    def _add(
        self, text: str, holder: Any, name: str, names: _Names, *, called: str | None = None
    ) -> None:
        """Add a variable, which the code calls ``called`` if not ``name``."""
        known = self.variables.get((id(holder), name))
        called = called or name
        self.variables[id(holder), name] = Variable(
            text,
            holder,
            name,
            names.read if known is None else names.read | known.attributes,
            has_tensors=not isinstance(holder, (nn.Module, type)),
            is_changed=called in names.changed and (known is None or known.is_changed),
            is_used=called in names.used or (known is not None and known.is_used),
            used=names.used if known is None else names.used | known.used,
        )


def _defaults(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of arguments whose contents can change, with their names."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    for name, value in (
        *zip(names, defaults, strict=True),
        *(function.__kwdefaults__ or {}).items(),
    ):
        if isinstance(value, (*CONTAINERS, nn.Module)) or has_attributes(value):
            yield name, value


def _of_class(owner: Any, name: str) -> Any:
    """Return a method, or the getter of a property, by the class of its object."""
    for cls in type(owner).__mro__:
        if name in vars(cls):
            return getattr(vars(cls)[name], "fget", vars(cls)[name])
    return None


def _functions_of(value: Any, attributes: frozenset[str]) -> tuple[Any, ...]:
    """Return what code with this value may call: itself, and functions of an operator or module."""
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        return tuple(vars(value).values())
    if isinstance(value, types.ModuleType):
        return tuple(vars(value).get(name) for name in attributes)
    return (value.func if isinstance(value, functools.partial) else value,)


def _is_own(function: Any) -> bool:
    """Return whether ``function`` is Python code outside of the known libraries."""
    if not isinstance(function, types.FunctionType):
        return False
    return (function.__module__ or "").partition(".")[0] not in _LIBRARIES


@functools.cache
def _names_in(code: types.CodeType) -> _Names:
    """Return the names in a function, also in functions and loops inside of it."""
    every = [[*dis.get_instructions(part)] for part in _codes(code)]
    flat = [i for instructions in every for i in instructions]
    changes = [change for instructions in every for change in _changes(instructions)]
    only_changing = Counter(name for _, names in changes for name in names)
    stored = {i.argval for i in flat if i.opname == "STORE_GLOBAL"}
    attributes = {i.argval for i in flat if i.opname in (*_ATTRIBUTE, "STORE_ATTR")}
    changed = {name for names, _ in changes for name in names}
    loaded = Counter(i.argval for i in flat if i.opname in _NAMED)
    return _Names(
        frozenset({i.argval for i in flat if i.opname in _GLOBAL} | stored),
        frozenset(attributes),
        frozenset(changed),
        frozenset(name for name, num in loaded.items() if num > only_changing[name]),
        frozenset(attributes - changed),
    )


def _changes(code: Sequence[dis.Instruction]) -> Iterator[tuple[set[str], set[str]]]:
    """Yield, for each change, the names that may be changed, and those loaded only for that."""
    for index, instruction in enumerate(code):
        before = code[index - 1]
        if instruction.opname in _STORES:
            if before.opname == "SWAP":
                before = code[index - 2]
            is_augmented = before.opname == "BINARY_OP" and before.argrepr.endswith("=")
            names = {instruction.argval}
            yield names, names if is_augmented else set()
        elif instruction.opname in _ATTRIBUTE and instruction.argval in _MUTATORS:
            names = _names_at(code, index - 1)
            yield names, names if instruction.argval in _RETURNING_NONE else set()
        elif instruction.opname in _ITEM_STORES:
            if before.opname == "SWAP":  # an augmented assignment
                names = _names_at(code, index - 1)
                yield names, names
                continue
            # The container lies on the stack below the index.
            owner, num_missing = index, 1
            while num_missing > 0 and owner > 0:
                owner -= 1
                i = code[owner]
                arg = i.arg if i.opcode >= dis.HAVE_ARGUMENT else None
                num_missing -= dis.stack_effect(i.opcode, arg, jump=False)
            names = _names_at(code, owner - 1)
            yield names, names


def _names_at(code: Sequence[dis.Instruction], index: int) -> set[str]:
    """Return the name that an instruction loads; those of its line if it computes something."""
    instruction = code[index]
    if instruction.opname in _NAMED:
        return {instruction.argval}
    if instruction.opname.startswith("LOAD_"):
        return set()
    line = instruction.positions and instruction.positions.lineno
    return {
        i.argval
        for i in code
        if i.opname in _NAMED and (i.positions and i.positions.lineno) == line
    }


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def is_small_array(value: Any) -> bool:
    """Return whether ``value`` is a NumPy array that is compared by its numbers."""
    return type(value) is np.ndarray and value.size <= _MAX_NUMBERS


def has_attributes(value: Any) -> bool:
    """Return whether ``value`` is an object or module that may hold settings."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] not in _LIBRARIES
    if isinstance(value, (torch.Tensor, nn.Module, types.FunctionType, types.MethodType)):
        return False
    kind = value if isinstance(value, type) else type(value)
    owner = kind.__module__.partition(".")[0]
    return owner not in _LIBRARIES or isinstance(value, (types.SimpleNamespace, threading.local))
