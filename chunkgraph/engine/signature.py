"""Trees of arguments, flattened; what must stay equal from capture to replay.

The only place that imports torch's pytree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

from chunkgraph.engine.autocast import Autocast
from chunkgraph.errors import ReplayMismatchError

if TYPE_CHECKING:
    from chunkgraph.engine.backward_watch import BackwardSample

__all__ = [
    "Call",
    "Signature",
    "argument_paths",
    "detached",
    "distinct_tensors",
    "flatten",
    "flatten_call",
    "unflatten",
]


@dataclass(frozen=True)
class Call:
    """One call's arguments, flattened.

    Attributes:
        leaves: tensors and plain values.
        spec: the structure they stand in.
        autocast: how operators were cast in it; None where that is not known.
        backward: how its backward ran; None where that is not known.
    """

    leaves: list[Any]
    spec: TreeSpec
    autocast: Autocast | None = None
    backward: BackwardSample | None = None

    def as_cast_now(self) -> Call:
        """The same, with the automatic casting of this moment."""
        kinds = {t.device.type for t in self.tensors} - {"cpu"}
        return replace(self, autocast=Autocast.now(kinds.pop() if kinds else "cpu"))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensor leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def arguments(self) -> Any:
        """Positional and keyword arguments."""
        return tree_unflatten(self.leaves, self.spec)


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of a tree."""
    return tree_flatten(tree)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The tree with these leaves."""
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
    paths, _ = tree_flatten_with_path(call.arguments())
    named = {id(x): _path(path) for path, x in reversed(paths)}
    return [named[id(tensor)] for tensor in call.tensors]


def detached(tree: Any) -> Any:
    """The same tree with tensors on the same storage, cut from autograd; grad flags are kept."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().requires_grad_(leaf.requires_grad)

    return tree_map(cut, tree)


_COMPARABLE = (bool, int, float, complex, str, bytes, tuple, Enum, torch.dtype, torch.device)


class Signature:
    """What a chunk was captured with: structure, shapes, dtypes, devices and plain values.

    A call is compared in one pass over prepared keys; the differences are worked out only when
    that fails.

    Args:
        call: the captured call.
        label: names the chunk in errors.
    """

    def __init__(self, call: Call, label: str) -> None:
        self._label = label
        self._spec = call.spec
        self._autocast = call.autocast
        self._key = _key(call.leaves)
        self._plain = [
            (i, leaf) for i, leaf in enumerate(call.leaves) if not isinstance(leaf, torch.Tensor)
        ]
        self._tensors = [
            (i, leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
            for i, leaf in enumerate(call.leaves)
            if isinstance(leaf, torch.Tensor)
        ]
        args, kwargs = unflatten(call.leaves, call.spec)
        values = (*args, *kwargs.values())
        # Where every argument is a leaf, a call needs no walk over trees.
        self._is_flat = not any(isinstance(v, (tuple, list, dict)) for v in values) and (
            len(values) == len(call.leaves)
        )
        self._num_args = len(args)
        self._names = tuple(kwargs)
        self._keywords = kwargs.keys()

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Compare a call with the captured one and return its tensors, in order.

        Raises:
            ReplayMismatchError: listing every difference with its path.
        """
        if self._autocast is not None and not self._autocast.is_now():
            raise self._other_autocast(self._autocast)
        if self._is_flat and len(args) == self._num_args and kwargs.keys() == self._keywords:
            leaves: Sequence[Any] = (*args, *[kwargs[name] for name in self._names])
        else:
            call = flatten_call(args, kwargs)
            if call.spec != self._spec:
                raise self._mismatch(call)
            leaves = call.leaves
        for i, wanted in self._plain:
            leaf = leaves[i]
            if leaf is not wanted and not _equal(leaf, wanted):
                raise self._mismatch(flatten_call(args, kwargs))
        tensors: list[torch.Tensor] = []
        for i, shape, dtype, device, requires_grad in self._tensors:
            leaf = leaves[i]
            if (
                not isinstance(leaf, torch.Tensor)
                or leaf.shape != shape
                or leaf.dtype is not dtype
                or leaf.device != device
            ):
                raise self._mismatch(flatten_call(args, kwargs))
            if not requires_grad and leaf.requires_grad:
                raise self._missing_gradient(len(tensors), leaf)
            tensors.append(leaf)
        return tensors

    def _mismatch(self, call: Call) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self._label} was called with arguments that differ from those it was captured "
            f"with:\n{self._differences(call)}\n"
            "  To do: keep shapes, dtypes and options constant (pad to a fixed size), announce the "
            "change before the step so that the whole step runs eagerly (`step(shape_key=...)` or "
            "`step(eager=True)`), or release the graphs and capture again."
        )

    def _missing_gradient(self, index: int, tensor: torch.Tensor) -> ReplayMismatchError:
        """A gradient that was not captured would be missing without a word."""
        return ReplayMismatchError(
            f"{self._label}: tensor argument {index} (shape {tuple(tensor.shape)}) requires grad, "
            "but the sample it was captured with did not, so its gradient is not in the graph. "
            "Capture from a sample that requires grad, or detach the argument."
        )

    def _other_autocast(self, captured: Autocast) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self._label} was captured with autocast {captured}, and is called with "
            f"{Autocast.now(captured.device_type)}; the graph would cast as it was captured. Call "
            "it under one autocast, in warmup steps or around capture() as in every later step, or "
            "release the graphs and capture again."
        )

    def _differences(self, call: Call) -> str:
        if call.spec != self._spec:
            return f"  structure: captured {self._spec}\n             called   {call.spec}"
        paths = [path for path, _ in tree_flatten_with_path(unflatten(call.leaves, call.spec))[0]]
        return "\n".join(
            f"  {_path(path)}: captured {_show(was)}, called {_show(now)}"
            for path, was, now in zip(paths, self._key, _key(call.leaves), strict=True)
            if was is not now and not _equal(was, now)
        )


def _key(leaves: Sequence[Any]) -> list[Any]:
    return [
        (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]


def _equal(a: Any, b: Any) -> bool:
    """Whether two plain values (or tensor keys) are the same.

    Only for types whose equality is a plain truth value; other objects are equal to themselves.
    """
    return type(a) is type(b) and isinstance(a, _COMPARABLE) and bool(a == b)


def _show(key: Any) -> str:
    if isinstance(key, tuple) and len(key) == 3 and isinstance(key[0], torch.Size):
        return f"{tuple(key[0])} {key[1]} on {key[2]}"
    return repr(key)


def _path(path: Sequence[Any]) -> str:
    """``(args, kwargs)`` indexed by ``path``, written as the caller would."""
    root, *rest = (getattr(p, "idx", getattr(p, "key", p)) for p in path)
    head = f"argument {rest[0]}" if root == 0 else f"argument {rest[0]!r}"
    return head + "".join(f"[{p!r}]" for p in rest[1:])
