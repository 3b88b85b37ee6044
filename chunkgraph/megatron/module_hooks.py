"""Hooks of modules inside a captured part: a replay runs none of their Python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

from chunkgraph.errors import ConfigError

__all__ = ["refuse_hooks"]

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_KNOWN = ("torch", "transformer_engine", "megatron.core", "chunkgraph")
"""Packages whose hooks were read: weight norms, parameter gathers, fused operations."""
_KEEPING = ("megatron.core.transformer.moe.router_trace",)
"""Of these, modules whose hooks keep what they see."""
_MOST = 5


def refuse_hooks(inner: Mapping[str, nn.Module], label: str) -> None:
    """Refuse hooks that a capture would run once and no replay again.

    A hook may keep an output for a loss, count or log; then later steps would use the tensors of
    the capture, or see nothing. What a hook does cannot be told from outside, so that all are
    refused but those of packages that are known.

    Args:
        inner: the modules whose calls are captured, by name. Hooks of the captured module itself
            run outside of its ``forward``, at every call.
        label: names the chunk in errors.

    Raises:
        ConfigError: naming modules and hooks.
    """
    found = [
        f"{kind} of {name}: {_place(hook)}"
        for name, module in inner.items()
        for kind, hook in _hooks_of(vars(module))
        if not _is_known(hook)
    ]
    found += [
        f"global {kind} of all modules: {_place(hook)}"
        for kind, hook in _hooks_of(vars(torch_modules), "_global")
        if not _is_known(hook)
    ]
    if not found:
        return
    shown = [*found[:_MOST], *([f"and {len(found) - _MOST} more"] if len(found) > _MOST else [])]
    raise ConfigError(
        f"{label} has hooks on modules inside the part that is captured, which a replay does not "
        "run:\n  - "
        + "\n  - ".join(shown)
        + "\nRemove them by their handles, do what they do in the module's forward if it is a "
        "computation on the device, or train without chunk graphs."
    )


def _hooks_of(
    attributes: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, kind in _KINDS.items():
        for hook in (attributes.get(f"{prefix}{name}") or {}).values():
            yield kind, hook


def _code_of(hook: Callable[..., Any]) -> Any:
    """The function that a hook comes down to, or the class of an object that is called."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = inspect.unwrap(hook)
    function = getattr(hook, "__func__", hook)
    return function if inspect.isfunction(function) else type(function)


def _is_known(hook: Callable[..., Any]) -> bool:
    module = str(_code_of(hook).__module__)
    return (
        any(module == name or module.startswith(f"{name}.") for name in _KNOWN)
        and module not in _KEEPING
    )


def _place(hook: Callable[..., Any]) -> str:
    code = _code_of(hook)
    lines = getattr(code, "__code__", None)
    where = f" at {lines.co_filename}:{lines.co_firstlineno}" if lines is not None else ""
    return f"{code.__module__}.{code.__qualname__}{where}"
