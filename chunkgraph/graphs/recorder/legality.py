"""Refuse operators that a CUDA graph cannot hold, before they run, with the user's line.

On a GPU such an operator ends the capture with an error code that names neither operator nor line;
the recorder refuses the same operators by name. The decision uses torch's operator tags
(``data_dependent_output``, ``dynamic_output_shape``) and, for calls that never reach the
dispatcher, the called tensor method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, resolve_name

from chunkgraph.graphs.failure import check_backward, illegal_operation
from chunkgraph.graphs.random_state import are_same, draws, explicit_generator

_aten = torch.ops.aten

# Tagged as dynamic, but static for the arguments checked below.
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_BY_MASK = "indexes with a mask: its shape depends on values"
_MASKED_WRITES = {torch.Tensor.__setitem__, torch.Tensor.index_put_, torch.Tensor.index_put}
_HOST_READS = {
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__contains__,
    torch.Tensor.__complex__,
    torch.Tensor.__repr__,
    torch.Tensor.__format__,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}


def check_operator(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    generators: Sequence[torch.Generator],
    label: str,
) -> None:
    """Refuse ``func`` if a graph cannot hold it.

    Its result or its shape depends on values in device memory, or it draws from a generator that
    is neither the default one nor one of ``generators``.

    Raises:
        IllegalOperationError: The message has operator, reason, file and line.
    """
    why = _why_not(func)
    if why is not None and not _is_static(func, args, kwargs):
        raise illegal_operation(str(func), why, label)
    check_backward(func, args, label)
    if draws(func):
        generator = explicit_generator(args, kwargs)
        if generator is not None and not any(are_same(generator, other) for other in generators):
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
        if func in _HOST_READS:
            name = resolve_name(func) or str(func)
            raise illegal_operation(name, "reads a tensor on the host", self.label)
        if func in _MASKED_WRITES and len(args) == 3 and isinstance(args[2], torch.Tensor):
            indices = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
            if any(_is_mask(i) for i in indices):
                raise illegal_operation(resolve_name(func) or str(func), _BY_MASK, self.label)
        options = (*args[1:], *(kwargs or {}).values())
        # Only the literal: a `torch.device`, or a subclass of str that stands for one, is often the
        # device of another tensor in the chunk.
        if func is torch.Tensor.to and any(type(o) is str and o == "cpu" for o in options):
            raise illegal_operation(
                "torch.Tensor.to('cpu')", "copies a tensor to the host", self.label
            )
        return func(*args, **(kwargs or {}))
