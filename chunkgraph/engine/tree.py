"""Flatten trees of arguments, and compare calls with the captured one.

The engine uses torch's pytree functions only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from chunkgraph._text import shorten, shown
from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.layout import same_layout
from chunkgraph.engine.plain_values import Uncomparable, key_of
from chunkgraph.engine.tensor_guard import new_guard
from chunkgraph.errors import ReplayMismatchError

if TYPE_CHECKING:
    from chunkgraph.engine.capture.backward_watch import BackwardSample

__all__ = [
    "Call",
    "Signature",
    "argument_paths",
    "distinct_tensors",
    "flatten",
    "flatten_call",
    "unflatten",
]


@dataclass(frozen=True)
class Call:
    """One call's arguments, flattened.

    Attributes:
        leaves: tensors, possibly repeated, and plain values.
        spec: the structure of the arguments.
        autocast: autocast setting of the call; None if unknown.
        backward: facts about its backward; None if unknown.
        results: numbers of the `tensors` that take a gradient and are not leaves of autograd.
        problem: why no graph can be captured from the call, or "".
    """

    leaves: list[Any]
    spec: TreeSpec
    autocast: Autocast | None = None
    backward: BackwardSample | None = None
    results: frozenset[int] = frozenset()
    problem: str = ""

    def sampled(self) -> Call:
        """Return the call as a sample: detached from autograd, with the present autocast setting.

        Tensors keep their memory and ``requires_grad``.
        """
        if problem := _problem(self):
            return replace(self.emptied(), problem=problem)
        tensors = self.tensors
        kinds = {t.device.type for t in tensors} - {"cpu"}
        return replace(
            self.filled([t.detach().requires_grad_(t.requires_grad) for t in tensors]),
            autocast=Autocast.now(kinds.pop() if kinds else "cpu"),
            results=frozenset(
                i for i, t in enumerate(tensors) if t.requires_grad and not t.is_leaf
            ),
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the different tensors among the leaves, in order."""
        return distinct_tensors(self.leaves)

    @property
    def takes_gradients(self) -> bool:
        """Return whether any input takes a gradient; if none does, there is no input half."""
        return any(t.requires_grad for t in self.tensors)

    @property
    def places(self) -> list[int | None]:
        """Return for each leaf the number of its tensor; None for a plain value."""
        numbers: dict[int, int] = {}
        return [
            numbers.setdefault(id(leaf), len(numbers))
            if isinstance(leaf, (torch.Tensor, _Hole))
            else None
            for leaf in self.leaves
        ]

    def filled(self, tensors: Sequence[Any]) -> Call:
        """Return the call with these instead of its `tensors`."""
        leaves = [
            leaf if place is None else tensors[place]
            for leaf, place in zip(self.leaves, self.places, strict=True)
        ]
        return replace(self, leaves=leaves)

    def sharing_as(self, other: Call) -> Call:
        """Return the call with arguments made identical where they are identical in ``other``."""
        if self.spec != other.spec:
            return self
        first: dict[int, Any] = {}
        leaves = [
            leaf if place is None else first.setdefault(place, leaf)
            for leaf, place in zip(self.leaves, other.places, strict=True)
        ]
        return replace(self, leaves=leaves)

    def emptied(self) -> Call:
        """Return the call without its tensors, to be `filled`."""
        return self.filled([_Hole() for _ in self.tensors])

    def arguments(self) -> Any:
        """Return the positional and keyword arguments."""
        return tree_unflatten(self.leaves, self.spec)

    def named_leaves(self) -> list[tuple[str, Any]]:
        """Return each leaf with its path, as the caller would write it."""
        return [(_path(path), leaf) for path, leaf in tree_flatten_with_path(self.arguments())[0]]


class _Hole:
    """The placeholder of a tensor in a call."""


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves and the structure of a tree."""
    return tree_flatten(tree)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """Return the tree of this structure with these leaves."""
    return tree_unflatten(leaves, spec)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Flatten positional and keyword arguments of a call."""
    leaves, spec = tree_flatten((args, kwargs))
    return Call(leaves, spec)


def distinct_tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``leaves``, each once, in order."""
    return list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())


def argument_paths(call: Call) -> list[str]:
    """Return a name for each tensor of ``call``, such as ``argument 1['mask']``."""
    named = {id(leaf): path for path, leaf in reversed(call.named_leaves())}
    return [named[id(tensor)] for tensor in call.tensors]


def _problem(call: Call) -> str:
    """Return why no graph can be captured from a call, or ""."""
    if torch._C._are_functorch_transforms_active():
        return "it was called under torch.func (grad, vmap, jvp), which replays do not support."
    for path, leaf in call.named_leaves():
        if not isinstance(leaf, torch.Tensor):
            try:
                key_of(leaf)
            except Uncomparable as error:
                return (
                    f"{path}{error.where} cannot be compared from call to call: it is {error.why}. "
                    "A replay uses its value in the capture, whatever the call's value is. Pass "
                    "tensors, numbers, strings, and tuples, dicts or dataclasses of them."
                )
        elif leaf.layout is not torch.strided:
            return (
                f"{path} is a sparse tensor ({leaf.layout}), whose memory no graph can hold. Pass "
                "it dense (to_dense()), or its indices and values."
            )
    return ""


_Facts = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]
"""Shape, strides, dtype, device and ``requires_grad`` of a tensor."""


class Signature:
    """The structure, the tensors' shapes and layouts, and the plain values of a captured call.

    A call is compared at once; its differences are computed only if that fails.

    Args:
        call: the captured call.
        label: the chunk's name in errors.
    """

    def __init__(self, call: Call, label: str) -> None:
        self._label = label
        self._autocast = call.autocast
        self._spec = call.spec
        self._places = call.places
        plain = [(i, v) for i, v in enumerate(call.leaves) if not isinstance(v, torch.Tensor)]
        self._keys = {i: key_of(value) for i, value in plain}
        # Often the same objects are passed again, which need no key.
        self._constants = [(i, v if type(v) in _IMMUTABLE else object()) for i, v in plain]
        self._facts: list[_Facts] = [
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in call.tensors
        ]
        # Compares all tensors at once with those of the last call that was compared one by one.
        self._fits = new_guard(call.tensors)
        self._firsts = [self._places.index(n) for n in range(len(self._facts))]
        self._repeated = [
            (i, self._firsts[n])
            for i, n in enumerate(self._places)
            if n is not None and i != self._firsts[n]
        ]
        self._named = [(path, _shown(leaf)) for path, leaf in call.named_leaves()]
        args, kwargs = call.arguments()
        values = (*args, *kwargs.values())
        # If every argument is a leaf, a call needs no walk over trees.
        self._is_flat = len(values) == len(call.leaves) and all(map(_is_same, values, call.leaves))
        self._num_args = len(args)
        self._names = tuple(kwargs)
        self._keywords = kwargs.keys()

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Compare a call with the captured one and return its different tensors, in order.

        Raises:
            ReplayMismatchError: the call differs; the message lists every difference with its path.
        """
        if self._autocast is not None and not self._autocast.is_now():
            raise self._other_autocast(self._autocast)
        if self._is_flat and len(args) == self._num_args and kwargs.keys() == self._keywords:
            leaves: Sequence[Any] = (*args, *map(kwargs.__getitem__, self._names))
        else:
            call = flatten_call(args, kwargs)
            if call.spec != self._spec:
                raise self._mismatch(self._other_structure(call))
            leaves = call.leaves
        tensors = [*map(leaves.__getitem__, self._firsts)]
        if not self._fits(*tensors) or not self._are_equal(leaves):
            if differences := self._differences(flatten_call(args, kwargs)):
                raise self._mismatch(differences)
            self._fits = new_guard(tensors)
        return tensors

    def _are_equal(self, leaves: Sequence[Any]) -> bool:
        """Return whether repeated tensors and plain values are the captured ones."""
        for i, first in self._repeated:
            if leaves[i] is not leaves[first]:
                return False
        for i, constant in self._constants:
            if leaves[i] is not constant and not _has_key(leaves[i], self._keys[i]):
                return False
        return True

    def _mismatch(self, differences: Sequence[str]) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self._label} was called with arguments that differ from those it was captured "
            "with:\n" + "\n".join(f"  {line}" for line in differences) + "\n"
            "  To do: keep shapes, dtypes and options constant (pad to a fixed size), announce the "
            "change before the step so that the whole step runs eagerly (`step(shape_key=...)` or "
            "`step(eager=True)`), or release the graphs and capture again."
        )

    def _other_autocast(self, captured: Autocast) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self._label} was captured with autocast {captured}, and is called with "
            f"{Autocast.now(captured.device_type)}; the graph would cast as in the capture. Use "
            "the same autocast in the warmup steps (or around capture()) and in every later step, "
            "or release the graphs and capture again."
        )

    def _differences(self, call: Call) -> list[str]:
        """Return what differs in a call of the same structure.

        Strides of dimensions of size 1 may differ, and a tensor need not require grad.
        """
        lines: list[str] = []
        for i, (path, leaf) in enumerate(call.named_leaves()):
            place = self._places[i]
            if place is None:
                is_equal = _has_key(leaf, self._keys[i])
            else:
                is_equal = isinstance(leaf, torch.Tensor) and _fits(leaf, self._facts[place])
            if not is_equal:
                was, now = self._named[i][1], _shown(leaf)
                if place is not None and was == now:
                    _, stride, *_, requires_grad = self._facts[place]
                    was += f" {_detail(stride, requires_grad)}"
                    now += f" {_detail(leaf.stride(), leaf.requires_grad)}"
                lines.append(f"{path}: captured {was}, called {now}")
        if not lines and call.places != self._places:
            was, now = self._groups(self._places), self._groups(call.places)
            lines.append(f"arguments that are one tensor: captured {was}, called {now}")
        return lines

    def _groups(self, places: Sequence[int | None]) -> str:
        """Return the names of arguments that are one tensor."""
        by_place: dict[int, list[str]] = {}
        for (path, _), place in zip(self._named, places, strict=True):
            if place is not None:
                by_place.setdefault(place, []).append(path)
        groups = [" = ".join(names) for names in by_place.values() if len(names) > 1]
        return shorten(", ".join(groups) or "none")

    def _other_structure(self, call: Call) -> list[str]:
        captured, called = ([path for path, _ in n] for n in (self._named, call.named_leaves()))
        missing = [path for path in captured if path not in called]
        more = [path for path in called if path not in captured]
        if not missing and not more:
            was, now = shorten(str(self._spec)), shorten(str(call.spec))
            return [f"structure: captured {was}", f"           called   {now}"]
        lines = [
            ("captured, but not called with", missing),
            ("called with, but not captured", more),
        ]
        return [f"structure, {what}: {shorten(', '.join(names))}" for what, names in lines if names]


def _fits(tensor: torch.Tensor, captured: _Facts) -> bool:
    """Return whether a graph that was captured with a tensor of these facts can take ``tensor``."""
    shape, stride, dtype, device, requires_grad = captured
    return (
        tensor.layout is torch.strided
        and (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, device)
        and same_layout(shape, tensor.stride(), stride)
        and (requires_grad or not tensor.requires_grad)
    )


def _shown(leaf: Any) -> str:
    """Return the text of an argument in messages."""
    if not isinstance(leaf, torch.Tensor):
        return shown(leaf)
    text = f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}"
    return text if leaf.layout is torch.strided else f"{text}, {leaf.layout}"


def _detail(stride: tuple[int, ...], requires_grad: bool) -> str:
    return f"with strides {stride}, {'requires grad' if requires_grad else 'without grad'}"


_IMMUTABLE = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})


def _has_key(value: Any, key: Any) -> bool:
    try:
        return bool(key_of(value) == key)
    except Uncomparable:
        return False


def _is_same(a: object, b: object) -> bool:
    return a is b


def _path(path: Sequence[Any]) -> str:
    """Return the text of ``(args, kwargs)`` indexed by ``path``, as the caller would write it."""
    root, *rest = (getattr(p, "idx", getattr(p, "key", getattr(p, "name", p))) for p in path)
    head = f"argument {rest[0]}" if root == 0 else f"argument {rest[0]!r}"
    return head + "".join(f"[{p!r}]" for p in rest[1:])
