"""Refuse operators that a CUDA graph cannot hold, before they run, with the user's line.

On a GPU such an operator ends the capture with an error code that names neither operator nor line;
the recorder refuses the same operators by name. The decision uses torch's operator tags
(``data_dependent_output``, ``dynamic_output_shape``) and, for calls that never reach the
dispatcher, the called tensor method.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode_temporarily,
    resolve_name,
)

from chunkgraph.errors import IllegalOperationError
from chunkgraph.graphs.location import current_location
from chunkgraph.graphs.random_state import (
    are_same,
    draws,
    explicit_generator,
    patched,
)

__all__ = [
    "HostReadGuard",
    "as_without_guard",
    "as_without_modes",
    "check_backward",
    "check_generator",
    "check_operator",
    "fills_evenly",
    "illegal_operation",
    "is_decided_by_node",
]

_aten = torch.ops.aten
_num_modes = torch._C._len_torch_dispatch_stack

# Tagged as dynamic, but static for the arguments checked below.
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_BY_MASK = "indexes with a mask: its shape depends on values"
_MASKED_WRITES = {torch.Tensor.__setitem__, torch.Tensor.index_put_, torch.Tensor.index_put}
_HOST_READS: dict[Any, str] = {
    torch.Tensor.cpu: "copies a tensor to the host",
    torch.Tensor.numpy: "copies a tensor to the host",
    torch.Tensor.tolist: "reads a tensor on the host",
    torch.Tensor.item: "reads a tensor on the host",
    torch.Tensor.__bool__: "reads a tensor on the host (in an `if` or `while`)",
    torch.Tensor.__int__: "reads a tensor on the host",
    torch.Tensor.__float__: "reads a tensor on the host",
    torch.Tensor.__index__: "reads a tensor on the host",
    torch.Tensor.__contains__: "reads a tensor on the host",
    torch.Tensor.__complex__: "reads a tensor on the host",
    torch.Tensor.__repr__: "prints a tensor, which reads it on the host",
    torch.Tensor.__format__: "prints a tensor, which reads it on the host",
    torch.Tensor.__array__: "gives a tensor to NumPy, which reads it on the host",
    torch.Tensor.__dlpack__: "gives a tensor to another library, which may read it on the host",
}
_SPLITS = {torch.tensor_split, torch.Tensor.tensor_split}
_CASTING_INSIDE = {torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention}
_max_pool1d = torch.max_pool1d
_one_hot = torch.nn.functional.one_hot

# Backwards that read values on the host. Under a dispatch mode torch uses other formulas with other
# bits: for each node, the operator that only this other formula runs (None: any operator).
_READING_BACKWARDS: dict[str, OpOverload | None] = {
    "ProdBackward0": None,
    "ProdBackward1": None,
    "MaskedFillBackward1": _aten.where.self,  # the gradient of the number that is filled in
}

_EVENLY_DISTRIBUTED = {"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"}


def fills_evenly(node_name: str) -> bool:
    """Return whether a node of autograd distributes a gradient evenly over equal values."""
    return node_name in _EVENLY_DISTRIBUTED


def is_decided_by_node(node_name: str) -> bool:
    """Return whether captures handle the operators of this autograd node in a special way."""
    return node_name in _EVENLY_DISTRIBUTED or node_name in _READING_BACKWARDS


_KEEP_ON_DEVICE = (
    "keep the value on the device (torch.where, masks of fixed shape), move the line out of the "
    "chunk, or compute it on the host before the step."
)


def illegal_operation(
    what: str, why: str, label: str, remedy: str = _KEEP_ON_DEVICE
) -> IllegalOperationError:
    """Return the error for an operator that a graph cannot hold, with the user's line."""
    where = current_location()
    node = torch._C._current_autograd_node()
    place = f"\n  at {where}" if where else ""
    if node is not None:
        place += f"\n  in the backward of {node.name()}"
    return IllegalOperationError(
        f"{what} {why}, so the graph cannot hold it; capturing {label}.{place}\n  To do: {remedy}"
    )


def check_operator(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], label: str
) -> None:
    """Refuse ``func`` if its result or its shape depends on values in device memory.

    Raises:
        IllegalOperationError: ``func`` does this; the message has operator, reason, file and line.
    """
    why = _why_not(func)
    if why is not None and not _is_static(func, args, kwargs):
        raise illegal_operation(str(func), why, label)
    if func is _aten.lift_fresh.default and not args[0].untyped_storage().resizable():
        raise illegal_operation(
            "torch.from_numpy", "shares host memory, whose changes a replay does not see", label
        )
    check_backward(func, args, label)


def check_backward(func: OpOverload, args: Sequence[Any], label: str) -> None:
    """Refuse backwards that read values on the host, which they avoid only under a dispatch mode.

    Raises:
        IllegalOperationError: This is such a backward; the message names it.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        return
    name = node.name()
    if name not in _READING_BACKWARDS or _READING_BACKWARDS[name] not in (None, func):
        return
    if any(isinstance(a, torch.Tensor) and a.numel() > 1 for a in args):
        raise illegal_operation(
            name.removesuffix("0").removesuffix("1"), "reads device values on the host", label
        )


def check_generator(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    declared: Sequence[torch.Generator],
    label: str,
) -> None:
    """Refuse draws from a generator that was not declared.

    Raises:
        IllegalOperationError: ``func`` draws from such a generator; the message has operator,
            reason, file and line.
    """
    if not draws(func):
        return
    generator = explicit_generator(args, kwargs)
    if generator is not None and not any(are_same(generator, other) for other in declared):
        raise illegal_operation(
            str(func),
            "draws from a generator that was not declared (pass it to ChunkGraphs as one of "
            "`generators`)",
            label,
        )


@functools.cache
def _why_not(func: OpOverload) -> str | None:
    """Return why no graph can hold ``func``, by its tags; None if one can."""
    if func in _INDEXING:
        return _BY_MASK
    if torch.Tag.data_dependent_output in func.tags:
        return "reads device values on the host"
    if torch.Tag.dynamic_output_shape in func.tags:
        return "has an output shape that depends on values"
    return None


def _is_static(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a graph can hold ``func`` with these arguments, against its tags."""
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is not None
    if func not in _INDEXING:
        return False
    return not any(map(_is_mask, args[1])) or _fills_where_masked(func, args, kwargs)


def _fills_where_masked(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether this is ``x[mask] = number``, which torch runs as ``masked_fill``.

    A number reaches the dispatcher as a tensor without dimensions. So does a device tensor of one
    element, which `HostReadGuard` refuses.
    """
    if func is _aten.index.Tensor or len(args) > 3 or kwargs.get("accumulate", False):
        return False
    indices, value = args[1], args[2]
    return sum(i is not None for i in indices) == 1 and value.dim() == 0


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _one_hot_of_device(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Compute `F.one_hot` as on a GPU; for a CPU tensor torch reads the classes on the host."""
    if num_classes <= 0 or tensor.dtype != torch.int64:
        return _one_hot(tensor, num_classes)
    return tensor.new_zeros(*tensor.shape, num_classes).scatter_(-1, tensor.unsqueeze(-1), 1)


@contextmanager
def as_without_modes() -> Iterator[None]:
    """Make torch run the operators that it runs without a dispatch mode."""
    with patched(torch, "max_pool1d", _with_cpu_kernel):
        yield


def _with_cpu_kernel(max_pool1d: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``max_pool1d`` to run the CPU's kernel for inputs that need no gradient.

    The kernel's result is contiguous. Under a mode torch composes ``max_pool1d`` of other
    operators, whose result has the layout of the input, unless autograd is bypassed.
    """

    def call(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002
        if not _num_modes() or (torch.is_grad_enabled() and input.requires_grad):
            return max_pool1d(input, *args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return max_pool1d(input, *args, **kwargs)

    return call


@contextmanager
def as_without_guard() -> Iterator[None]:
    """Make torch choose the same code paths as without a `HostReadGuard`.

    Some modules take another path if a mode overrides functions. Functions that `torch.compile`
    turns into kernels are refused, since the recorder does not see the kernels. Backends that run
    torch's operators, such as ``aot_eager``, compile nothing under a dispatch mode, with the same
    bits.
    """
    with ExitStack() as stack:
        stack.enter_context(patched(torch.overrides, "has_torch_function", _unguarded))
        dynamo = importlib.import_module("torch._dynamo.eval_frame")  # as dispatch modes do
        if hasattr(dynamo, "_callback_from_stance"):
            stack.enter_context(patched(dynamo, "_callback_from_stance", _refusing_inductor))
        yield


def _current_guard() -> HostReadGuard | None:
    modes = _get_current_function_mode_stack()
    return next((m for m in reversed(modes) if isinstance(m, HostReadGuard)), None)


def _unguarded(has_torch_function: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def of_others(args: Any) -> bool:
        modes = _get_current_function_mode_stack()
        if len(modes) != 1 or not isinstance(modes[0], HostReadGuard):
            return has_torch_function(args)
        with _pop_mode_temporarily():
            return has_torch_function(args)

    return of_others


def _refusing_inductor(callback_from_stance: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def callback_of(callback: Any) -> Any:
        chosen = backend = callback_from_stance(callback)
        if not chosen:
            return chosen
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        is_inductor = getattr(backend, "compiler_name", None) == "inductor"
        guard = _current_guard() if is_inductor and not torch._dynamo.config.disable else None
        if guard is not None:
            raise illegal_operation(
                "torch.compile(backend='inductor')",
                "makes kernels that the CPU recorder cannot record (compile with 'aot_eager' on "
                "a CPU; a CUDA graph holds them)",
                guard.label,
            )
        return chosen

    return callback_of


class HostReadGuard(TorchFunctionMode):
    """Refuse tensor methods that reach the host without passing the dispatcher."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        why = _HOST_READS.get(func)
        if why is not None:
            raise illegal_operation(resolve_name(func) or str(func), why, self.label)
        if func in _MASKED_WRITES and len(args) == 3 and isinstance(args[2], torch.Tensor):
            indices = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
            if any(_is_mask(i) for i in indices):
                raise illegal_operation(resolve_name(func) or str(func), _BY_MASK, self.label)
        if func is _one_hot and len(args) + len(kwargs or {}) > 1:
            return _one_hot_of_device(*args, **(kwargs or {}))
        if func is _max_pool1d:  # the original, if the user imported it by name
            return torch.max_pool1d(*args, **(kwargs or {}))
        if func in _SPLITS and any(
            isinstance(a, torch.Tensor) for a in (*args[1:], *(kwargs or {}).values())
        ):
            raise illegal_operation(
                "torch.tensor_split", "reads indices or sections on the host", self.label
            )
        if func in _CASTING_INSIDE and torch.is_autocast_enabled("cpu"):
            raise IllegalOperationError(
                f"torch.{func.__name__} casts inside its kernel under autocast on a CPU, but "
                f"recorded operators do not; capturing {self.label}.\n  at {current_location()}\n"
                "  To do: call torch.backends.mha.set_fastpath_enabled(False), or disable autocast "
                "around the layer."
            )
        # Only the literal: a `torch.device`, or a subclass of str that stands for one, is often the
        # device of another tensor in the chunk.
        if func is torch.Tensor.to and "cpu" in _names(args[1:], kwargs):
            raise illegal_operation(
                "torch.Tensor.to('cpu')", "copies a tensor to the host", self.label
            )
        return func(*args, **(kwargs or {}))


def _names(args: Sequence[Any], kwargs: dict[str, Any] | None) -> list[str]:
    return [a for a in (*args, *(kwargs or {}).values()) if type(a) is str]
