"""Run callbacks before torch destroys the process groups.

NCCL does not destroy a communicator while a CUDA graph contains its collectives: it waits for the
graph to be freed, without a time limit. So `torch.distributed.destroy_process_group` at the end of
a script hangs if graphs are still alive.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["before_groups_end"]

_NAME = "destroy_process_group"
_HOOK = "_chunkgraph_hook"


def before_groups_end(done: Callable[[], None]) -> Callable[[], None]:
    """Call a method before all process groups are destroyed.

    It is not called when a single group is destroyed, nor by code that imported
    ``destroy_process_group`` from ``torch.distributed`` earlier.

    Args:
        done: A bound method. Its object is referenced weakly. If it raises, the groups stay.

    Returns:
        A function that removes the callback.
    """
    hook: _Hook | None = getattr(getattr(dist, _NAME), _HOOK, None)
    if hook is None:
        hook = _Hook()
    return hook.add(done)


class _Hook:
    """Replace the function in both modules that have it, while any callback is registered.

    The replacement carries its hook as an attribute, so that all callers share one hook.
    """

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._replaced: list[tuple[Any, Any, Any]] = []
        for module in (dist, dist.distributed_c10d):
            original = getattr(module, _NAME)
            replacement = self._replacement(original)
            self._replaced.append((module, original, replacement))
            setattr(module, _NAME, replacement)

    def add(self, done: Callable[[], None]) -> Callable[[], None]:
        """Register a bound method; return a function that removes it."""
        method = weakref.WeakMethod(done, self._remove)
        self._methods.append(method)
        return lambda: self._remove(method)

    def _remove(self, method: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._methods[:] = [one for one in self._methods if one is not method]
        if self._methods:
            return
        for module, original, replacement in self._replaced:
            # Other code may have wrapped the replacement; without callbacks it only passes on.
            if getattr(module, _NAME) is replacement:
                setattr(module, _NAME, original)

    def _replacement(self, original: Any) -> Any:
        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> None:
            if group in (None, dist.GroupMember.WORLD):
                for method in list(self._methods):
                    if (call := method()) is not None:
                        call()
            original(group)

        setattr(destroy_process_group, _HOOK, self)
        return destroy_process_group
