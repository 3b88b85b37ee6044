"""Make Megatron's pipeline communicator receive into given memory.

Megatron allocates a received tensor in the middle of a private method. That one allocation is
intercepted; everything else (groups, order, batches, waiting) stays Megatron's.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from chunkgraph.megatron.core.access import import_megatron

_COMMUNICATION = "megatron.core.pipeline_parallel.p2p_communication"
_GROUPS_OF_A_SCHEDULE = ("tp", "cp", "pp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp")


class Direction(Enum):
    """Direction of a receive."""

    FORWARD = "forward"
    """A stage's input, from the previous stage."""
    BACKWARD = "backward"
    """The gradient of a stage's output, from the next stage."""


TakeBuffer = Callable[[Direction, tuple[int, ...], torch.dtype | None], torch.Tensor | None]
"""Return the memory of the next receive of a direction; see `SlotReceiver.take`."""


class _ReceiveInto(TorchFunctionMode):
    """Serve the allocations of received tensors, the only ones that require grad, from ``take``."""

    def __init__(self, take: TakeBuffer, directions: list[Direction]) -> None:
        super().__init__()
        self._take = take
        self._left = deque(directions)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and self._left and kwargs.get("requires_grad"):
            shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            buffer = self._take(self._left.popleft(), tuple(shape), kwargs.get("dtype"))
            if buffer is not None:
                return buffer
        return func(*args, **kwargs)


@functools.cache
def _communicator_class() -> Any:
    base = _plain_class()

    class SlotCommunicator(base):  # type: ignore[misc, valid-type]
        """Megatron's communicator, receiving into memory of ``take``."""

        def __init__(self, pp_group: Any, config: Any, take: TakeBuffer) -> None:
            super().__init__(pp_group, config)
            self._take = take

        def _communicate(self, *, recv_prev: bool, recv_next: bool, **others: Any) -> Any:
            # Megatron allocates the two tensors of one exchange in this order.
            directions = [Direction.FORWARD] * bool(recv_prev)
            directions += [Direction.BACKWARD] * bool(recv_next)
            with _ReceiveInto(self._take, directions):
                return super()._communicate(recv_prev=recv_prev, recv_next=recv_next, **others)

    return SlotCommunicator


def _plain_class() -> Any:
    return import_megatron(_COMMUNICATION).P2PCommunicator


def make_communicator(pp_group: Any, config: Any, take: TakeBuffer) -> Any:
    """Return a P2PCommunicator over ``pp_group`` that receives into the memory of ``take``.

    It does not synchronise the device after a batch (``batch_p2p_sync``, a workaround for a bug of
    old torch releases). The compute stream waits for every request anyway, and a host that waits
    cannot launch ahead.
    """
    config = copy.copy(config)
    config.batch_p2p_sync = False
    return _communicator_class()(pp_group, config, take)


def is_plain_communicator(communicator: object) -> bool:
    """Return whether this is exactly Megatron's communicator, not a subclass."""
    return type(communicator) is _plain_class()


def is_pipelining_schedule(forward_backward: Callable[..., Any]) -> bool:
    """Return whether this is one of Megatron's pipeline schedules, which take a communicator."""
    if not hasattr(_plain_class(), "_communicate"):
        return False
    module = import_megatron("megatron.core.pipeline_parallel.schedules")
    return forward_backward in (
        module.forward_backward_pipelining_without_interleaving,
        module.forward_backward_pipelining_with_interleaving,
    )


def default_groups() -> Any:
    """Return the process groups that a schedule uses by default."""
    groups = import_megatron("megatron.core.process_groups_config").ProcessGroupCollection
    return groups.use_mpu_process_groups(list(_GROUPS_OF_A_SCHEDULE))
