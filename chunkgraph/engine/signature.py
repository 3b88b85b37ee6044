"""Flatten trees of arguments, and compare calls with the captured one.

The engine uses torch's pytree functions only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from chunkgraph.engine.autocast import Autocast, ForwardCasts, cast_check
from chunkgraph.engine.layout import same_layout
from chunkgraph.engine.plain_values import Uncomparable, is_immutable, key_of
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


_EXACT = frozenset({bool, int, str, bytes})
"""Types whose equal values are the same in every bit."""


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
        elif names := _attributes_of(leaf):
            return (
                f"{path} is a tensor with attributes ({names}). A graph copies its inputs without "
                "attributes. Pass their values as arguments."
            )
    return ""


def _attributes_of(tensor: torch.Tensor) -> str:
    """Return the names of attributes that a program has set on a tensor."""
    return ", ".join(name for name in tensor.__dict__ if not name.startswith("_chunkgraph_"))


class Signature:
    """The structure, the tensors' shapes and layouts, and the plain values of a captured call.

    A call is compared in one pass over prepared keys; differences are computed only if that fails.

    Args:
        call: the captured call.
        label: the chunk's name in errors.
        deciding: numbers of tensors without which an output would not require grad.
        casts: how the forward depends on autocast; None: only through the setting of the call.
    """

    def __init__(
        self,
        call: Call,
        label: str,
        deciding: Iterable[int] = (),
        casts: ForwardCasts | None = None,
    ) -> None:
        self._label = label
        self._call = call.emptied()
        self._spec = call.spec
        self._named = [(path, _facts(leaf)) for path, leaf in call.named_leaves()]
        plain = [(i, v) for i, v in enumerate(call.leaves) if not isinstance(v, torch.Tensor)]
        self._constants = [(i, v, key_of(v)) for i, v in plain if is_immutable(v)]
        self._values = [(i, key_of(v)) for i, v in plain if not is_immutable(v)]
        firsts: list[int] = []
        self._repeated: list[tuple[int, int]] = []
        for i, place in enumerate(call.places):
            if place == len(firsts):
                firsts.append(i)
            elif place is not None:
                self._repeated.append((i, firsts[place]))
        self._firsts = firsts
        self._tensors = [
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in call.tensors
        ]
        self._deciding = tuple(deciding)
        for number in self._deciding:
            path, facts = self._named[firsts[number]]
            self._named[firsts[number]] = path, replace(facts, decides_grad=True)
        # Compares all tensors at once with those of the first accepted call.
        self._fits: Callable[..., bool] | None = None
        casts = casts or ForwardCasts()
        self._cast_inputs = casts.inputs
        self._is_cast_otherwise = cast_check(call.autocast, has_blocks=casts.has_blocks)
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
        if self._is_cast_otherwise():
            raise self._other_autocast()
        if self._is_flat and len(args) == self._num_args and kwargs.keys() == self._keywords:
            leaves: Sequence[Any] = (*args, *map(kwargs.__getitem__, self._names))
        else:
            call = flatten_call(args, kwargs)
            if call.spec != self._spec:
                raise self._mismatch(args, kwargs)
            leaves = call.leaves
        for i, constant, key in self._constants:
            leaf = leaves[i]
            if leaf is not constant and not _is_same_constant(leaf, constant, key):
                raise self._mismatch(args, kwargs)
        for i, key in self._values:
            if not _has_key(leaves[i], key):
                raise self._mismatch(args, kwargs)
        tensors = [*map(leaves.__getitem__, self._firsts)]
        fits = self._fits
        if fits is None or not fits(*tensors):
            if not self._accepts(tensors):
                raise self._mismatch(args, kwargs)
            if fits is None:
                self._fits = new_guard(tensors)
        for tensor in tensors:
            if tensor.__dict__ and _attributes_of(tensor):
                raise self._mismatch(args, kwargs)
        if self._repeated and any(leaves[i] is not leaves[first] for i, first in self._repeated):
            raise self._mismatch(args, kwargs)
        if self._cast_inputs:
            self._check_leaves(tensors)
        return tensors

    def _accepts(self, tensors: Sequence[Any]) -> bool:
        """Return whether these are different tensors that the graph can take."""
        try:
            for tensor, facts in zip(tensors, self._tensors, strict=True):
                shape, stride, dtype, device, requires_grad = facts
                if (
                    not isinstance(tensor, torch.Tensor)
                    or tensor.shape != shape
                    or not same_layout(shape, tensor.stride(), stride)
                    or tensor.dtype is not dtype
                    or tensor.device != device
                    or (tensor.requires_grad and not requires_grad)
                ):
                    return False
        except RuntimeError:  # a sparse tensor has no strides
            return False
        if not all(tensors[number].requires_grad for number in self._deciding):
            return False
        return len({*map(id, tensors)}) == len(tensors)

    def _check_leaves(self, tensors: Sequence[torch.Tensor]) -> None:
        for number in self._cast_inputs:
            tensor, was_result = tensors[number], number in self._call.results
            if tensor.requires_grad and tensor.is_leaf is was_result:
                path, _ = self._named[self._firsts[number]]
                kinds = ("a leaf of autograd", "the result of an operator")
                was, now = kinds[was_result], kinds[not tensor.is_leaf]
                raise ReplayMismatchError(
                    f"{self._label}: {path} was {was} when it was captured, and is {now} in this "
                    "call. Under autocast, operators share one cast of a leaf, and its gradients "
                    "are summed in the lower precision. Capture from a call like those of training "
                    "(warmup steps do), or use autocast(cache_enabled=False)."
                )

    def _mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayMismatchError:
        call = flatten_call(args, kwargs)
        return ReplayMismatchError(
            f"{self._label} was called with arguments that differ from those it was captured "
            f"with:\n{self._differences(call)}\n"
            "  To do: keep shapes, dtypes and options constant (pad to a fixed size), announce the "
            "change before the step so that the whole step runs eagerly (`step(shape_key=...)` or "
            "`step(eager=True)`), or release the graphs and capture again."
        )

    def _other_autocast(self) -> ReplayMismatchError:
        captured = self._call.autocast
        assert captured is not None
        return ReplayMismatchError(
            f"{self._label} was captured with autocast {captured}, and is called with "
            f"{Autocast.now(captured.device_type)}; the graph would cast as in the capture. Use "
            "the same autocast in the warmup steps (or around capture()) and in every later step, "
            "or release the graphs and capture again."
        )

    def _differences(self, call: Call) -> str:
        leaves = call.named_leaves()
        if call.spec != self._spec:
            return self._other_structure(call.spec, [path for path, _ in leaves])
        lines: list[str] = []
        for (path, facts), (_, leaf) in zip(self._named, leaves, strict=True):
            lines += [f"  {text}" for text in facts.differences(path, _facts(leaf))]
        pairs = zip(self._named, self._call.places, call.places, strict=True)
        if not lines and any(was != now for _, was, now in pairs):
            was, now = (self._groups(places) for places in (self._call.places, call.places))
            lines.append(
                f"  arguments that are one and the same tensor: captured {was}, called {now}"
            )
        return "\n".join(lines)

    def _groups(self, places: Sequence[int | None]) -> str:
        """Return the names of arguments that are one tensor."""
        by_place: dict[int, list[str]] = {}
        for (path, _), place in zip(self._named, places, strict=True):
            if place is not None:
                by_place.setdefault(place, []).append(path)
        groups = [" = ".join(names) for names in by_place.values() if len(names) > 1]
        return shorten(", ".join(groups) or "none")

    def _other_structure(self, spec: TreeSpec, paths: Sequence[str]) -> str:
        captured = [path for path, _ in self._named]
        missing = [path for path in captured if path not in paths]
        more = [path for path in paths if path not in captured]
        if not missing and not more:
            was, now = shorten(str(self._spec)), shorten(str(spec))
            return f"  structure: captured {was}\n             called   {now}"
        lines = [
            ("captured, but not called with", missing),
            ("called with, but not captured", more),
        ]
        return "\n".join(
            f"  structure, {what}: {shorten(', '.join(names))}" for what, names in lines if names
        )


@dataclass(frozen=True)
class _Facts:
    """The facts of an argument that are compared, and its text in messages."""

    text: str
    key: Any
    is_tensor: bool = False
    stride: tuple[int, ...] = ()
    requires_grad: bool = False
    attributes: str = ""
    decides_grad: bool = False

    def differences(self, path: str, now: _Facts) -> list[str]:
        """Return the differences between this captured argument and a call's."""
        if self.key != now.key:
            also = ", which prints the same but differs" if self.text == now.text else ""
            return [f"{path}: captured {self.text}, called {now.text}{also}"]
        if not self.is_tensor:
            return []
        lines: list[str] = []
        dims = zip(self.key[1], self.stride, now.stride, strict=True)
        if any(size > 1 and a != b for size, a, b in dims):
            lines.append(
                f"{path}: captured with strides {self.stride}, called with {now.stride}; operators "
                "may give other bits in another layout. Use the captured layout (contiguous())"
            )
        if now.requires_grad and not self.requires_grad:
            lines.append(
                f"tensor {path} ({self.text}) requires grad, but the sample it was captured with "
                "did not, so its gradient is not in the graph. Capture from a sample that requires "
                "grad, or detach it"
            )
        if self.decides_grad and not now.requires_grad:
            lines.append(
                f"tensor {path} ({self.text}) does not require grad, but the sample it was "
                "captured with did, and an output requires grad only because of it. Pass a tensor "
                "that requires grad"
            )
        if now.attributes:
            lines.append(f"{path}: it has attributes ({now.attributes}), which a graph ignores")
        return lines


def _facts(leaf: Any) -> _Facts:
    if not isinstance(leaf, torch.Tensor):
        try:
            return _Facts(shown(leaf), key_of(leaf))
        except Uncomparable as error:
            return _Facts(f"{shown(leaf)}, which cannot be compared ({error})", object())
    text = f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}"
    key = (torch.Tensor, leaf.shape, leaf.dtype, leaf.device, leaf.layout)
    if leaf.layout is not torch.strided:
        return _Facts(f"{text}, {leaf.layout}", key, is_tensor=True)
    return _Facts(text, key, True, leaf.stride(), leaf.requires_grad, _attributes_of(leaf))


def _is_same_constant(value: Any, constant: Any, key: Any) -> bool:
    kind = type(value)
    if kind is not type(constant):
        return False
    if kind in _EXACT:
        return bool(value == constant)
    if kind is float and value == constant != 0.0:  # equal bits; 0.0 and -0.0 differ
        return True
    return _has_key(value, key)


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
