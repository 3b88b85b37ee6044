"""Arguments as a tree of tensors and plain values, and what a call must look like to be replayed.

The engine uses torch's pytree functions only here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten

from chunkgraph._text import shorten, shown
from chunkgraph.engine.autocast import Autocast
from chunkgraph.errors import ReplayMismatchError

if TYPE_CHECKING:
    from chunkgraph.engine.capture.output_gradients import BackwardSample


def _is_size(value: Any) -> bool:
    """Return whether ``value`` is a leaf of which torch would make a tuple."""
    return isinstance(value, torch.Size)


flatten, unflatten = partial(tree_flatten, is_leaf=_is_size), tree_unflatten


@dataclass(frozen=True)
class Call:
    """One call's arguments, flattened.

    Attributes:
        leaves: tensors, possibly repeated, and plain values.
        spec: the structure of the arguments.
        autocast: autocast setting of the call; None if unknown.
        backward: facts about its backward; None if unknown.
        non_leaves: numbers of the `tensors` that take a gradient and are results of operators.
        problem: why no graph can be captured from the call, or "".
    """

    leaves: list[Any]
    spec: TreeSpec
    autocast: Autocast | None = None
    backward: BackwardSample | None = None
    non_leaves: frozenset[int] = frozenset()
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
            non_leaves=frozenset(
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
            numbers.setdefault(id(leaf), len(numbers)) if isinstance(leaf, torch.Tensor) else None
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
        """Return the call with placeholders instead of its tensors, to be `filled`."""
        needs = [t.requires_grad for t in self.tensors]
        return self.filled([torch.empty(0, device="meta", requires_grad=need) for need in needs])

    def arguments(self) -> Any:
        """Return the positional and keyword arguments."""
        return tree_unflatten(self.leaves, self.spec)

    def named_leaves(self) -> list[tuple[str, Any]]:
        """Return each leaf with its path, as the caller would write it."""
        found, _ = tree_flatten_with_path(self.arguments(), is_leaf=_is_size)
        return [(_path(path), leaf) for path, leaf in found]


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Flatten positional and keyword arguments of a call."""
    return Call(*flatten((args, kwargs)))


def distinct_tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``leaves``, each once, in order."""
    return list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())


def argument_paths(call: Call) -> list[str]:
    """Return a name for each tensor of ``call``, such as ``argument 1['mask']``."""
    named = {id(leaf): path for path, leaf in reversed(call.named_leaves())}
    return [named[id(tensor)] for tensor in call.tensors]


def _path(path: Sequence[Any]) -> str:
    """Return the text of ``(args, kwargs)`` indexed by ``path``, as the caller would write it."""
    root, *rest = (getattr(p, "idx", getattr(p, "key", getattr(p, "name", p))) for p in path)
    head = f"argument {rest[0]}" if root == 0 else f"argument {rest[0]!r}"
    return head + "".join(f"[{p!r}]" for p in rest[1:])


def _problem(call: Call) -> str:
    """Return why no graph can be captured from a call, or ""."""
    if torch._C._are_functorch_transforms_active():
        return "it was called under torch.func (grad, vmap, jvp), which replays do not support."
    for path, leaf in call.named_leaves():
        if not isinstance(leaf, torch.Tensor):
            try:
                _plain_fact(leaf)
            except _NoFactError as error:
                return (
                    f"{path}{error} and cannot be compared from call to call. A replay uses its "
                    "value in the capture, whatever the call's value is. Pass tensors, numbers, "
                    "strings, and tuples, dicts or dataclasses of them."
                )
        elif leaf.layout is not torch.strided:
            return (
                f"{path} is a sparse tensor ({leaf.layout}), whose memory no graph can hold. Pass "
                "it dense (to_dense()), or its indices and values."
            )
    return ""


class Signature:
    """What a call must have in common with the captured one.

    That is the structure, the autocast setting, the tensors' shapes, layouts, dtypes and devices,
    which arguments are one tensor, and the plain values. A tensor need not require grad,
    even if the captured one did.

    Args:
        call: the captured call.
        label: the chunk's name in errors.
    """

    def __init__(self, call: Call, label: str) -> None:
        self._label, self._autocast, self._spec = label, call.autocast, call.spec
        self._named = _named_facts(call)
        self._facts = [fact for fact, _ in self._named.values()]
        places = call.places
        self._firsts = [places.index(n) for n in range(len(call.tensors))]
        # Often the same objects are passed again, which need no comparison if they cannot change.
        self._constants = [
            (i, leaf if isinstance(leaf, float) or self._facts[i][1] is leaf else object())
            for i, leaf in enumerate(call.leaves)
            if places[i] is None
        ]
        self._every = [(i, object()) for i in range(len(call.leaves))]
        # Compares all tensors at once with those of the last call that was compared one by one.
        self._fits = new_guard([t for t in call.leaves if isinstance(t, torch.Tensor)])
        args, kwargs = call.arguments()
        values = (*args, *kwargs.values())
        # If every argument is a leaf, a call needs no walk over trees.
        self._is_flat = [*map(id, values)] == [*map(id, call.leaves)]
        self._num_args, self._names, self._keywords = len(args), tuple(kwargs), kwargs.keys()

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
            leaves, spec = flatten((args, kwargs))
            if spec != self._spec:
                raise self._other_arguments(args, kwargs)
        tensors = [*map(leaves.__getitem__, self._firsts)]
        fits = self._fits(*tensors)
        for i, constant in self._constants if fits else self._every:
            if leaves[i] is not constant and not _accepts(self._facts[i], _fact(leaves, i)):
                raise self._other_arguments(args, kwargs)
        if not fits:
            self._fits = new_guard([t for t in leaves if isinstance(t, torch.Tensor)])
        return tensors

    def _other_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ReplayMismatchError:
        call, absent = flatten_call(args, kwargs), (None, "nothing")
        called = _named_facts(call)
        lines = []
        for path in {**self._named, **called}:
            (was, text), (now, text_now) = self._named.get(path, absent), called.get(path, absent)
            if not _accepts(was, now):
                lines.append(f"{path}: captured {text}, called {text_now}")
        if not lines:
            was, now = shorten(str(self._spec)), shorten(str(call.spec))
            lines = [f"structure: captured {was}", f"           called   {now}"]
        return ReplayMismatchError(
            f"{self._label} was called with arguments that differ from those it was captured "
            "with:\n" + "\n".join(f"  {line}" for line in lines) + "\n"
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


class _TensorFact(NamedTuple):
    """What a graph depends on of a tensor. Strides of dimensions of size 1 have no meaning."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    requires_grad: bool


def _fact(leaves: Sequence[Any], i: int) -> Any:
    """Return what a graph depends on of leaf ``i``: a `_TensorFact`, or a `_plain_fact`.

    Of a tensor that is also an earlier leaf, the number of that leaf.
    """
    leaf = leaves[i]
    if not isinstance(leaf, torch.Tensor):
        try:
            return _plain_fact(leaf)
        except _NoFactError:
            return object()
    first = next(j for j, other in enumerate(leaves) if other is leaf)
    if first != i:
        return first
    shape, is_strided = leaf.shape, leaf.layout is torch.strided
    strides = leaf.stride() if is_strided and 0 not in shape else ()
    strides = tuple(stride for n, stride in zip(shape, strides, strict=False) if n != 1)
    return _TensorFact(shape, strides, leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad)


def _accepts(captured: Any, fact: Any) -> bool:
    """Return whether a graph takes a leaf of which ``fact`` is known."""
    if captured == fact:
        return True
    return isinstance(fact, _TensorFact) and bool(captured == fact._replace(requires_grad=True))


def _named_facts(call: Call) -> dict[str, tuple[Any, str]]:
    """Return the fact of each leaf, and its text in messages, by its path."""
    named = call.named_leaves()
    facts = [_fact(call.leaves, i) for i in range(len(named))]
    return {path: (f, _text(leaf, f, named)) for f, (path, leaf) in zip(facts, named, strict=True)}


def _text(leaf: Any, fact: Any, named: Sequence[tuple[str, Any]]) -> str:
    if not isinstance(leaf, torch.Tensor):
        return shown(leaf)
    if isinstance(fact, int):
        return f"the same tensor as {named[fact][0]}"
    text = f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}"
    if leaf.layout is not torch.strided:
        text += f", {leaf.layout}"
    elif not leaf.is_contiguous():
        text += f" with strides {leaf.stride()}"
    return text + " (requires grad)" * leaf.requires_grad


# Compared by identity. What they refer to may change unseen, as what a forward reads from Python.
_BY_IDENTITY: tuple[type, ...] = (
    type(None),
    Enum,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    *([torch.distributed.ProcessGroup] if torch.distributed.is_available() else []),
)


_IDENTITY: Any = object.__eq__


class _NoFactError(Exception):
    """A value has no fact; the text says which part of it, and why."""


def _plain_fact(value: Any, where: str = "") -> Any:
    """Return the fact of a plain value: its type, and copies of its contents or the value itself.

    A replay runs no Python: whatever value an argument has, the graph uses that of the capture.
    Equal facts mean equal values.

    Args:
        value: the value.
        where: the part of an argument that it is, such as ``.scale``.

    Raises:
        _NoFactError: a part has no fact.
    """
    kind = type(value)
    if isinstance(value, (float, complex)):  # NaN is equal to itself, -0.0 is not 0.0
        return kind, repr(value)
    if isinstance(value, (list, tuple)):
        return kind, [_plain_fact(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict):
        return kind, [(_plain_fact(k), _plain_fact(v, f"{where}[{k!r}]")) for k, v in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return kind, [_plain_fact(getattr(value, name), f"{where}.{name}") for name in names]
    if isinstance(value, (set, frozenset)):
        return kind, frozenset((type(v), repr(v) if isinstance(v, float) else v) for v in value)
    if isinstance(value, torch.Tensor):
        raise _NoFactError(f"{where} is a tensor in an object (pass it by itself, or in a dict)")
    is_compared = kind.__eq__ is not _IDENTITY and kind.__hash__ is not None  # not an array
    if not (is_compared or callable(value) or isinstance(value, _BY_IDENTITY)):
        raise _NoFactError(f"{where} is an object of type {kind.__qualname__}")
    return kind, value


def new_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return torch.compile's guard on these tensors; `_no_guard` if torch has no such guard.

    The guard returns whether its arguments are different tensors that match these one by one in
    type, shape, strides, dtype, device, ``requires_grad`` and dispatch keys.
    """
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards
        guard = make(
            *tensors,
            dynamic_dims_sizes=[[*t.shape] for t in tensors],
            dynamic_dims_strides=[[*t.stride()] for t in tensors],
        )
        check: Callable[..., bool] = guard.check
        return check if check(*tensors) is True else _no_guard
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return _no_guard


def _no_guard(*_: object) -> bool:
    """Return False, so that callers compare the slow way."""
    return False
