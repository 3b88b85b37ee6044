"""Make Megatron's pipeline communicator receive into given memory.

Megatron allocates a received tensor in the middle of a private method. That one allocation is
intercepted; everything else (groups, order, batches, waiting) stays Megatron's.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from chunkgraph.megatron.core.access import import_megatron, private_names

__all__ = [
    "Direction",
    "ReceiveBuffers",
    "default_groups",
    "is_pipelining_schedule",
    "is_plain_communicator",
    "make_communicator",
]

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_COMMUNICATION = "megatron.core.pipeline_parallel.p2p_communication"
_GROUPS_OF_A_SCHEDULE = ("tp", "cp", "pp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp")


class Direction(Enum):
    """Direction of a receive."""

    FORWARD = "forward"
    """A stage's input, from the previous stage."""
    BACKWARD = "backward"
    """The gradient of a stage's output, from the next stage."""


class ReceiveBuffers(Protocol):
    """Provide the memory of one receive after another."""

    def take(
        self, direction: Direction, shape: tuple[int, ...] | None, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Return the memory of the next receive of ``direction``.

        Called once for every receive, in order.

        Args:
            direction: Direction of the receive.
            shape: Shape of the tensor that Megatron allocates; None if this receive's allocation
                was not seen, so that the result is ignored.
            dtype: Dtype of that tensor; None likewise.

        Returns:
            A contiguous leaf that requires grad, of that shape and dtype; None to let Megatron
            allocate.
        """


class _ReceiveInto(TorchFunctionMode):
    """Serve the allocations of received tensors, the only ones that require grad, from buffers."""

    def __init__(self, buffers: ReceiveBuffers, directions: list[Direction]) -> None:
        super().__init__()
        self._buffers = buffers
        self._left = deque(directions)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and self._left and kwargs.get("requires_grad"):
            shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            buffer = self._buffers.take(self._left.popleft(), tuple(shape), kwargs.get("dtype"))
            if buffer is not None:
                return buffer
        return func(*args, **kwargs)

    def finish(self) -> None:
        """Report the receives whose allocations were not seen."""
        while self._left:
            self._buffers.take(self._left.popleft(), None, None)


@functools.cache
def _communicator_class() -> Any:
    base = _plain_class()

    class SlotCommunicator(base):  # type: ignore[misc, valid-type]
        """Megatron's communicator, receiving into ``buffers``."""

        def __init__(self, pp_group: Any, config: Any, buffers: ReceiveBuffers) -> None:
            super().__init__(pp_group, config)
            self._buffers = buffers

        def _communicate(self, *, recv_prev: bool, recv_next: bool, **others: Any) -> Any:
            # Megatron allocates the two tensors of one exchange in this order.
            directions = [Direction.FORWARD] * bool(recv_prev)
            directions += [Direction.BACKWARD] * bool(recv_next)
            if not directions:
                return super()._communicate(recv_prev=False, recv_next=False, **others)
            mode = _ReceiveInto(self._buffers, directions)
            with mode:
                result = super()._communicate(recv_prev=recv_prev, recv_next=recv_next, **others)
            mode.finish()
            return result

    return SlotCommunicator


def _plain_class() -> Any:
    (base,) = private_names(_COMMUNICATION, "P2PCommunicator")
    return base


def make_communicator(pp_group: Any, config: Any, buffers: ReceiveBuffers) -> Any:
    """Return a P2PCommunicator over ``pp_group`` that receives into ``buffers``.

    It does not synchronise the device after a batch (``batch_p2p_sync``, a workaround for a bug of
    old torch releases). The compute stream waits for every request anyway, and a host that waits
    cannot launch ahead.
    """
    config = copy.copy(config)
    config.batch_p2p_sync = False
    return _communicator_class()(pp_group, config, buffers)


def is_plain_communicator(communicator: object) -> bool:
    """Return whether this is exactly Megatron's communicator, not a subclass."""
    return type(communicator) is _plain_class()


def is_pipelining_schedule(forward_backward: Callable[..., Any]) -> bool:
    """Return whether this is one of Megatron's pipeline schedules and accepts a communicator."""
    if not hasattr(_plain_class(), "_communicate"):
        return False
    schedules = private_names(
        _SCHEDULES,
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    )
    parameters = inspect.signature(forward_backward).parameters.keys()
    return forward_backward in schedules and {"p2p_communicator", "pg_collection"} <= parameters


def default_groups() -> Any:
    """Return the process groups that a schedule uses by default."""
    build = getattr(import_megatron(_SCHEDULES), "_build_default_pg_collection", None)
    if build is not None:
        return build()
    (groups,) = private_names("megatron.core.process_groups_config", "ProcessGroupCollection")
    return groups.use_mpu_process_groups(list(_GROUPS_OF_A_SCHEDULE))
