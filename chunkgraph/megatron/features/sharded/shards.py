"""What the feature needs of a wrapper that shards parameters, and the hooks in its way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

__all__ = ["Shards", "remove_hooks", "wrapper_of"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Shards:
    """The sharded parameters of one model chunk.

    Attributes:
        flag: Megatron's flag of the wrapper, without dashes.
        package: Name of the package whose hooks of modules and parameters shard them.
    """

    flag: str
    package: str

    def facts(self) -> dict[str, object]:
        """Return the facts that rules check."""
        return {self.flag: True, "is_fully_sharded": False}

    def keep_in_place(self, undo: ExitStack) -> None:
        """Give gathered parameters memory that stays the same until ``undo`` is closed."""
        raise NotImplementedError

    def gather(self) -> None:
        """Gather the present values, and point the modules at them."""
        raise NotImplementedError

    def show_gathered(self) -> None:
        """Point the modules at the values that `gather` has gathered."""
        raise NotImplementedError


def wrapper_of(chunk: nn.Module, module_name: str, class_name: str) -> Any:
    """Return the wrapper of this class among those of ``chunk``, or None."""
    module: Any = chunk
    while isinstance(module, nn.Module):
        kind = type(module)
        if (kind.__module__, kind.__name__) == (module_name, class_name):
            return module
        module = getattr(module, "module", None)
    return None


def remove_hooks(
    package: str,
    modules: Iterable[nn.Module],
    parameters: Sequence[nn.Parameter],
    undo: ExitStack,
) -> None:
    """Remove the hooks of a package until ``undo`` is closed."""
    for module in modules:
        for name in _HOOKS:
            _remove(package, getattr(module, name), undo)
    for parameter in parameters:
        _remove(package, parameter._post_accumulate_grad_hooks or {}, undo)


def _remove(package: str, hooks: dict[int, Any], undo: ExitStack) -> None:
    before = dict(hooks)
    own = [key for key, hook in hooks.items() if _module_of(hook).startswith(package)]
    if not own:
        return
    for key in own:
        del hooks[key]

    def restore() -> None:
        added = {key: hook for key, hook in hooks.items() if key not in before}
        hooks.clear()
        hooks.update({**before, **added})

    undo.callback(restore)


def _module_of(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__module__", ""))
