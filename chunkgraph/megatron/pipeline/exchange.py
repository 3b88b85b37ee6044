"""Tensors between the stages of a pipeline, sent and received without waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.megatron.core.p2p import Direction, ReceiveBuffers
from chunkgraph.megatron.pipeline.transfer_groups import TransferGroups
from chunkgraph.schedules import Action, Op

__all__ = ["Exchange", "Received"]

_Microbatch = tuple[int, int]
"""A stage and a microbatch."""


@dataclass(frozen=True)
class Received:
    """What every receive of a step makes.

    Attributes:
        shape: Of every tensor that stages exchange.
        dtype: Likewise.
        device: Likewise.
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
    """The transfers of one rank in one step.

    `run` posts transfers; the stream that takes a received tensor waits for it. A send is waited
    for when the next one of its direction is posted, so a rank keeps at most two sent tensors.
    Neighbouring stages are on different ranks.

    Args:
        groups: Of the transfers; None with one rank.
        received: What a receive makes.
        sent: Called with an output once its send has ended for the stream.
    """

    def __init__(
        self,
        groups: TransferGroups | None,
        received: Received,
        sent: Callable[[torch.Tensor], None],
    ) -> None:
        self._groups = groups
        self._received = received
        self._sent = sent
        self._receives: dict[tuple[Op, _Microbatch], tuple[torch.Tensor, Any]] = {}
        self._sends: dict[Op, tuple[_Microbatch, torch.Tensor, Any]] = {}
        self._made: dict[tuple[Op, _Microbatch], torch.Tensor] = {}

    def keep(self, op: Op, stage: int, microbatch: int, tensor: torch.Tensor) -> None:
        """Keep a tensor that an action made until it is sent (``op`` is its send)."""
        self._made[op, (stage, microbatch)] = tensor

    def take(self, op: Op, stage: int, microbatch: int) -> torch.Tensor:
        """Return a received tensor (``op`` is its receive); the current stream waits for it."""
        pending = self._sends.get(Op.SEND_F)
        if op is Op.RECV_B and pending is not None and pending[0] == (stage, microbatch):
            self._end_send(Op.SEND_F)  # its receiver has used it
        tensor, request = self._receives.pop((op, (stage, microbatch)))
        request.wait()
        return tensor

    def run(self, action: Action) -> None:
        """Post a send or a receive."""
        groups, op, key = self._groups, action.op, (action.stage, action.microbatch)
        assert groups is not None
        if op is Op.RECV_F:
            tensor = self._received.make(Direction.FORWARD)
            self._receives[op, key] = tensor, dist.irecv(tensor, groups.previous, groups.forward)
        elif op is Op.RECV_B:
            tensor = self._received.make(Direction.BACKWARD)
            self._receives[op, key] = tensor, dist.irecv(tensor, groups.next, groups.backward)
        else:
            self._end_send(op)
            tensor = self._made.pop((op, key))
            if op is Op.SEND_F:
                request = dist.isend(tensor, groups.next, groups.forward)
            else:
                request = dist.isend(tensor, groups.previous, groups.backward)
            self._sends[op] = key, tensor, request

    def end(self) -> None:
        """Wait for the sends that are left."""
        for op in list(self._sends):
            self._end_send(op)

    def _end_send(self, op: Op) -> None:
        if op in self._sends:
            _, tensor, request = self._sends.pop(op)
            request.wait()
            if op is Op.SEND_F:
                self._sent(tensor)
