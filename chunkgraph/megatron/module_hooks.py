"""Refuse hooks of modules inside a captured part: a replay does not run them."""

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
_SAFE_PACKAGES = ("torch", "transformer_engine", "megatron.core", "chunkgraph")
"""Packages whose hooks are safe: weight norms, parameter gathers, fused operations."""
_UNSAFE_MODULES = ("megatron.core.transformer.moe.router_trace",)
"""Modules of these packages whose hooks keep the tensors that they see."""
_MAX_SHOWN = 5


def refuse_hooks(inner: Mapping[str, nn.Module], label: str) -> None:
    """Refuse hooks that run once in a capture and never in a replay.

    A hook may keep an output for a loss, a count or a log; later steps would then use the tensors
    of the capture, or see nothing. The effect of a hook is unknown, so all hooks are refused except
    those of packages that are known to be safe.

    Args:
        inner: The submodules of the captured module, by name. Hooks of the captured module itself
            are allowed: they run at every call, outside of its ``forward``.
        label: Name of the chunk in errors.

    Raises:
        ConfigError: There are such hooks; the message names them and their modules.
    """
    hooks = [
        f"{kind} of {name}: {_place(hook)}"
        for name, module in inner.items()
        for kind, hook in _hooks_of(vars(module))
        if not _is_safe(hook)
    ]
    hooks += [
        f"global {kind} of all modules: {_place(hook)}"
        for kind, hook in _hooks_of(vars(torch_modules), "_global")
        if not _is_safe(hook)
    ]
    if not hooks:
        return
    num_more = len(hooks) - _MAX_SHOWN
    lines = [*hooks[:_MAX_SHOWN], *([f"and {num_more} more"] if num_more > 0 else [])]
    raise ConfigError(
        f"{label} has hooks on modules inside the captured part, which a replay does not run:\n  - "
        + "\n  - ".join(lines)
        + "\nRemove them through their handles, move computations on the device into the module's "
        "forward, or train without chunk graphs."
    )


def _hooks_of(
    attributes: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, kind in _KINDS.items():
        for hook in (attributes.get(f"{prefix}{name}") or {}).values():
            yield kind, hook


def _code_of(hook: Callable[..., Any]) -> Any:
    """Return the function under a hook's wrappers, or the class of a callable object."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = inspect.unwrap(hook)
    function = getattr(hook, "__func__", hook)
    return function if inspect.isfunction(function) else type(function)


def _is_safe(hook: Callable[..., Any]) -> bool:
    module = str(_code_of(hook).__module__)
    return (
        any(module == name or module.startswith(f"{name}.") for name in _SAFE_PACKAGES)
        and module not in _UNSAFE_MODULES
    )


def _place(hook: Callable[..., Any]) -> str:
    code = _code_of(hook)
    lines = getattr(code, "__code__", None)
    where = f" at {lines.co_filename}:{lines.co_firstlineno}" if lines is not None else ""
    return f"{code.__module__}.{code.__qualname__}{where}"
