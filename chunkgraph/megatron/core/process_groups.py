"""What must be done before torch ends the process groups.

NCCL does not end a communicator while a CUDA graph holds collectives of it: it waits for the graph
to go, without a time limit. So `torch.distributed.destroy_process_group` at the end of a script
whose graphs are still there would hang.
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
    """Call a method when all process groups are about to end.

    Single groups may come and go without it. Whoever has taken the function out of
    ``torch.distributed`` before does not come by here.

    Args:
        done: a bound method; its object is not kept alive for this. If it raises, the groups stay.

    Returns:
        What ends it.
    """
    hook: _Hook | None = getattr(getattr(dist, _NAME), _HOOK, None)
    if hook is None:
        hook = _Hook()
    return hook.add(done)


class _Hook:
    """Stands in both modules that have the function, as long as somebody is to be called.

    It knows itself in the functions that it puts there, so that there is one, whoever comes.
    """

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._replaced: list[tuple[Any, Any, Any]] = []
        for module in (dist, dist.distributed_c10d):
            original = getattr(module, _NAME)
            own = self._before(original)
            self._replaced.append((module, original, own))
            setattr(module, _NAME, own)

    def add(self, done: Callable[[], None]) -> Callable[[], None]:
        """Call a bound method; returns what ends that."""
        method = weakref.WeakMethod(done, self._remove)
        self._methods.append(method)
        return lambda: self._remove(method)

    def _remove(self, method: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._methods[:] = [one for one in self._methods if one is not method]
        if self._methods:
            return
        for module, original, own in self._replaced:
            # Somebody else may stand before it by now, and then calls it, which passes.
            if getattr(module, _NAME) is own:
                setattr(module, _NAME, original)

    def _before(self, original: Any) -> Any:
        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> None:
            if group in (None, dist.GroupMember.WORLD):
                for method in list(self._methods):
                    if (call := method()) is not None:
                        call()
            original(group)

        setattr(destroy_process_group, _HOOK, self)
        return destroy_process_group
