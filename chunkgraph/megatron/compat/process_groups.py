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

from chunkgraph.megatron.compat.access import patch_attributes

__all__ = ["before_groups_end"]


def before_groups_end(done: Callable[[], None]) -> Callable[[], None]:
    """Call a method when all process groups are about to end, at most once.

    Single groups may come and go without it. Whoever has taken the function out of
    ``torch.distributed`` before does not come by here.

    Args:
        done: a bound method; its object is not kept alive for this.

    Returns:
        What ends it.
    """
    method = weakref.WeakMethod(done)
    c10d = dist.distributed_c10d
    destroy: Callable[..., None] = c10d.destroy_process_group
    is_over = False

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        nonlocal is_over
        call = None if is_over or group not in (None, dist.GroupMember.WORLD) else method()
        if call is not None:
            call()
            is_over = True
        destroy(group)

    replaced = {"destroy_process_group": destroy_process_group}
    undos = [(module, patch_attributes(module, replaced)) for module in (dist, c10d)]

    def undo() -> None:
        nonlocal is_over
        is_over = True
        for module, put_back in undos:
            # Another of these may stand before it by now, which then calls this one, which passes.
            if module.destroy_process_group is destroy_process_group:
                put_back()

    return undo
