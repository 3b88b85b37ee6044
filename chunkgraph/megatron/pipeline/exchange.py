"""Tensors between the stages of a pipeline, sent and received without waiting.

Megatron's P2PCommunicator does not carry them: it allocates each tensor that it receives, where a
replay needs it in a slot. With two ranks it moves half of the transfers to the group of the whole
job, so that no link has a group, and buffers, of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.megatron.core.p2p import Direction, ReceiveBuffers
from chunkgraph.megatron.pipeline.transfer_groups import Route

__all__ = ["Exchange", "Received"]


@dataclass(frozen=True)
class Received:
    """The tensors that the receives of a step return.

    Attributes:
        shape: Shape of every tensor that stages exchange.
        dtype: Their dtype.
        device: Their device.
        buffers: Memory to receive into; None: new memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    buffers: ReceiveBuffers | None

    @property
    def message_bytes(self) -> int:
        """Return the size of a tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, direction: Direction) -> torch.Tensor:
        """Return the memory of the next receive of a direction, which requires grad."""
        if self.buffers is not None:
            buffer = self.buffers.take(direction, self.shape, self.dtype)
            if buffer is not None:
                return buffer
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)


class Exchange:
    """The transfers of one direction of one rank in one step.

    The stream that takes a received tensor waits for it; no stream waits for a send before it is
    known to have ended. Neighbouring stages are on different ranks.

    Args:
        direction: The direction of the transfers.
        route: Where they go; None with one rank.
        received: Shape, dtype, device and memory of received tensors.
        sent: Called with a tensor once its send has ended for the stream.
    """

    def __init__(
        self,
        direction: Direction,
        route: Route | None,
        received: Received,
        sent: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._direction = direction
        self._route = route
        self._received = received
        self._sent = sent
        self._receives: dict[tuple[int, int], tuple[torch.Tensor, Any]] = {}
        self._made: dict[tuple[int, int], torch.Tensor] = {}
        self._pending: deque[tuple[torch.Tensor, Any]] = deque()
        self._num_ended = 0

    def keep(self, stage: int, microbatch: int, tensor: torch.Tensor) -> None:
        """Keep the tensor of a stage and a microbatch until it is sent."""
        self._made[stage, microbatch] = tensor

    def send(self, stage: int, microbatch: int) -> None:
        """Post the send of a kept tensor."""
        assert self._route is not None
        tensor = self._made.pop((stage, microbatch))
        request = dist.isend(tensor, self._route.target, self._route.sends)
        self._pending.append((tensor, request))

    def receive(self, stage: int, microbatch: int) -> None:
        """Post a receive."""
        assert self._route is not None
        tensor = self._received.make(self._direction)
        request = dist.irecv(tensor, self._route.source, self._route.receives)
        self._receives[stage, microbatch] = tensor, request

    def take(self, stage: int, microbatch: int) -> torch.Tensor:
        """Return a received tensor; the current stream waits for it."""
        tensor, request = self._receives.pop((stage, microbatch))
        request.wait()
        return tensor

    def end(self, num_sends: float = math.inf) -> None:
        """Wait until this number of the step's sends have ended, and drop their tensors."""
        while self._pending and self._num_ended < num_sends:
            tensor, request = self._pending.popleft()
            self._num_ended += 1
            request.wait()
            if self._sent is not None:
                self._sent(tensor)
