"""One network thread of gloo for all process groups of a CPU host.

torch gives every group a device of its own, whose thread wakes a hundred times a second whether
there is something to do or not. Megatron makes some fifty groups: the ranks of a job on one machine
would spend a good part of its cores on that.
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
    """Make groups from now on with the same devices; returns what undoes it.

    One device for each interface that ``GLOO_SOCKET_IFNAME`` names when the first group is made, or
    torch's default.
    """
    gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if gloo is None:  # this torch is built without it, and the first group says so
        return lambda: None
    devices: list[Any] = []

    class Sharing(type(gloo)):  # type: ignore[misc]
        """Makes groups of torch's own class, and knows them as what it makes."""

        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            if not devices:  # not before: its thread would not follow this process into a fork
                devices.extend(_new_devices(gloo))
            options = gloo._Options()
            options._devices = devices
            options._threads = 2 * len(devices)  # as torch has it
            options._timeout = timeout
            return gloo(store, rank, size, options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, gloo)

    class ProcessGroupGloo(gloo, metaclass=Sharing):
        """In the place of torch's."""

    return patch_attributes(distributed_c10d, {"ProcessGroupGloo": ProcessGroupGloo})


def _new_devices(gloo: Any) -> list[Any]:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in interfaces.split(",")]
