"""Stand-in leaves for parameters during a capture.

Autograd runs the node that accumulates a parameter's gradient on the stream where the node was
made. DDP keeps these nodes alive from its construction, on another stream than the one that
captures; a capture that reaches one is invalid. So a chunk is captured with fresh leaves on the
same memory instead of its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from chunkgraph.engine.module_tree import entries
from chunkgraph.errors import CaptureError


class ParameterAliases:
    """New leaves on the memory of ``parameters``.

    They replace parameters wherever a module and its parts keep them: in modules, in lists, and in
    plain objects such as Megatron's helper of a Mamba mixer (see `entries`).

    Args:
        module: the module whose parameters are replaced; None: use the parameters themselves.
        parameters: trainable parameters of ``module``.
        leaves: leaves by the id of the rank's parameters, shared by chunks with common parts; new
            leaves are added to it.
    """

    def __init__(
        self,
        module: nn.Module | None,
        parameters: Sequence[nn.Parameter],
        leaves: dict[int, nn.Parameter] | None = None,
    ) -> None:
        self._module = module
        self._parameters = tuple(parameters)
        self._leaves = {} if leaves is None else leaves
        if module is None:
            self.leaves = self._parameters
            return
        for parameter in self._parameters:
            if id(parameter) not in self._leaves:
                self._leaves[id(parameter)] = _alias(parameter)
        self.leaves = tuple(self._leaves[id(parameter)] for parameter in self._parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the module's parameters by the leaves in this block."""
        if self._module is None:
            yield
            return
        replaced = [
            (container, key, value, stand_in)
            for container, key, value, _ in entries(self._module)
            if (stand_in := self._stand_in(value)) is not value
        ]
        try:
            for values, key, _, stand_in in replaced:
                values[key] = stand_in
            yield
        finally:
            for values, key, value, _ in replaced:
                values[key] = value

    def check_memory(self, label: str) -> None:
        """Make sure that graphs work in the parameters' memory.

        Args:
            label: name of the chunk in errors.

        Raises:
            CaptureError: the forward has moved a leaf.
        """
        for parameter, leaf in zip(self._parameters, self.leaves, strict=True):
            if parameter.data_ptr() != leaf.data_ptr() or parameter.shape != leaf.shape:
                raise CaptureError(
                    f"{label}: its forward moves a parameter of shape {tuple(parameter.shape)} to "
                    "other memory, but graphs would keep using the present memory. Move it before "
                    "the capture (flatten_parameters() of an RNN), or update it in place."
                )

    def _stand_in(self, value: Any) -> Any:
        """Return the replacement of a value; the value itself unless it is or holds a parameter."""
        kind = type(value)
        if kind in weakref.ProxyTypes:  # whose object may be gone
            return value
        if kind is weakref.ref:  # nn.RNNBase compares them with what its modules hold
            target = value()
            leaf = self._stand_in(target) if isinstance(target, nn.Parameter) else target
            return value if leaf is target else weakref.ref(leaf)
        if isinstance(value, nn.Parameter):
            return self._leaves.get(id(value), value)
        if isinstance(value, tuple):
            items = [self._stand_in(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        return value


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(parameter.detach(), requires_grad=True)
    # main_grad and the marks that Megatron and Transformer Engine leave on parameters.
    alias.__dict__.update(parameter.__dict__)
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    if dtype.itemsize < parameter.dtype.itemsize:  # eager rounds each gradient, not their sum
        alias.grad_dtype = dtype
    return alias
