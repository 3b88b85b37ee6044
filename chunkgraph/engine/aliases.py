"""Stand-in leaves for parameters during a capture.

Autograd runs the node that accumulates a parameter's gradient on the stream where the node was
made. DDP keeps these nodes alive from its construction, on another stream than the one that
captures; a capture that reaches one is invalid. So a chunk is captured with fresh leaves on the
same memory in the place of its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["ParameterAliases"]


class ParameterAliases:
    """Fresh leaves on the memory of ``parameters``.

    They take the place of parameters in modules, and in plain objects that are attributes of
    modules, such as Megatron's helper of a Mamba mixer, which keeps some of the mixer's.

    Args:
        module: whose parameters are replaced; None: the parameters themselves are used.
        parameters: trainable parameters of ``module``.
    """

    def __init__(self, module: nn.Module | None, parameters: Sequence[nn.Parameter]) -> None:
        self._module = module
        self.leaves = tuple(parameters) if module is None else tuple(map(_alias, parameters))
        self._by_parameter = dict(zip(map(id, parameters), self.leaves, strict=True))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the module holds the leaves instead of its parameters."""
        if self._module is None:
            yield
            return
        replaced = [
            (holder, name, value)
            for holder in _holders(self._module)
            for name, value in holder.items()
            if type(value) not in weakref.ProxyTypes
            and isinstance(value, nn.Parameter)
            and id(value) in self._by_parameter
        ]
        try:
            for holder, name, parameter in replaced:
                holder[name] = self._by_parameter[id(parameter)]
            yield
        finally:
            for holder, name, parameter in replaced:
                holder[name] = parameter


def _holders(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Where ``module`` and its parts may keep parameters."""
    seen: set[int] = set()
    for submodule in module.modules():
        yield submodule._parameters
        attributes = vars(submodule)
        for value in (submodule, *attributes.values()):
            if type(value) in weakref.ProxyTypes:  # whose object may be gone
                continue
            own = getattr(value, "__dict__", None)
            is_part = value is not submodule and isinstance(value, (nn.Module, torch.Tensor))
            if isinstance(own, dict) and not is_part and id(own) not in seen:
                seen.add(id(own))
                yield own


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(parameter.detach(), requires_grad=True)
    # main_grad and the marks that Megatron and Transformer Engine leave on parameters.
    alias.__dict__.update(parameter.__dict__)
    return alias
