"""Share one gloo network thread among all process groups of a CPU host.

torch creates a gloo device for every group, whose thread wakes up a hundred times a second even if
it is idle. Megatron creates some fifty groups, so the ranks of a job on one machine would spend
much CPU time on these threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from chunkgraph.megatron.core.access import patch_attributes

__all__ = ["share_gloo_device"]


def share_gloo_device() -> Callable[[], None]:
    """Make all later gloo groups share their devices; return a function that undoes this.

    There is one device for each interface in ``GLOO_SOCKET_IFNAME`` at the first group, or torch's
    default device.
    """
    gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if gloo is None:  # this torch is built without gloo; the first group raises
        return lambda: None
    devices: list[Any] = []

    class Sharing(type(gloo)):  # type: ignore[misc]
        """Create groups of torch's class, and recognize them as instances."""

        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            if not devices:  # created late, since a fork does not copy the device's thread
                devices.extend(_new_devices(gloo))
            options = gloo._Options()
            options._devices = devices
            options._threads = 2 * len(devices)  # torch's default
            options._timeout = timeout
            return gloo(store, rank, size, options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, gloo)

    class ProcessGroupGloo(gloo, metaclass=Sharing):
        """Replace torch's class."""

    return patch_attributes(distributed_c10d, {"ProcessGroupGloo": ProcessGroupGloo})


def _new_devices(gloo: Any) -> list[Any]:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in interfaces.split(",")]
