"""Tensors between the stages of a pipeline, sent and received without waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.megatron.core.p2p import Direction, ReceiveBuffers

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

    def make(self, direction: Direction) -> torch.Tensor:
        """Return the memory of the next receive of a direction, which requires grad."""
        if self.buffers is not None:
            buffer = self.buffers.take(direction, self.shape, self.dtype)
            if buffer is not None:
                return buffer
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)


class Exchange:
    """The transfers of one direction of one rank in one step.

    `send` and `receive` post transfers; the stream that takes a received tensor waits for it. A
    send is waited for when the next one is posted, so a rank keeps at most two sent tensors.
    Neighbouring stages are on different ranks.

    Args:
        direction: The direction of the transfers.
        route: Process group, rank to send to and rank to receive from; None with one rank.
        received: Shape, dtype, device and memory of received tensors.
        sent: Called with a tensor once its send has ended for the stream.
    """

    def __init__(
        self,
        direction: Direction,
        route: tuple[Any, int, int] | None,
        received: Received,
        sent: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._direction = direction
        self._group: Any = None
        if route is not None:
            self._group, self._target, self._source = route
        self._received = received
        self._sent = sent
        self._receives: dict[tuple[int, int], tuple[torch.Tensor, Any]] = {}
        self._made: dict[tuple[int, int], torch.Tensor] = {}
        self._pending: tuple[tuple[int, int], torch.Tensor, Any] | None = None

    def keep(self, stage: int, microbatch: int, tensor: torch.Tensor) -> None:
        """Keep the tensor of a stage and a microbatch until it is sent."""
        self._made[stage, microbatch] = tensor

    def send(self, stage: int, microbatch: int) -> None:
        """Post the send of a kept tensor."""
        self.end()
        tensor = self._made.pop((stage, microbatch))
        request = dist.isend(tensor, self._target, self._group)
        self._pending = (stage, microbatch), tensor, request

    def receive(self, stage: int, microbatch: int) -> None:
        """Post a receive."""
        tensor = self._received.make(self._direction)
        request = dist.irecv(tensor, self._source, self._group)
        self._receives[stage, microbatch] = tensor, request

    def take(self, stage: int, microbatch: int) -> torch.Tensor:
        """Return a received tensor; the current stream waits for it."""
        tensor, request = self._receives.pop((stage, microbatch))
        request.wait()
        return tensor

    def end_send_of(self, stage: int, microbatch: int) -> None:
        """Wait for the latest send if it was that of this tensor, which was received."""
        if self._pending is not None and self._pending[0] == (stage, microbatch):
            self.end()

    def end(self) -> None:
        """Wait for the latest send."""
        if self._pending is not None:
            _, tensor, request = self._pending
            self._pending = None
            request.wait()
            if self._sent is not None:
                self._sent(tensor)
