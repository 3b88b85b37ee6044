"""Tensors between the stages of a pipeline, sent and received without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from chunkgraph.schedules import Action, Op

__all__ = ["Exchange"]

_Microbatch = tuple[int, int]
"""A stage and a microbatch."""


class Exchange:
    """The transfers of one rank in one step, through Megatron's communicator.

    `run` posts transfers; the stream that takes a received tensor waits for it. A send is waited
    for when the next one of its direction is posted, so a rank keeps at most two sent tensors.
    Neighbouring stages are on different ranks.

    Args:
        communicator: Megatron's P2PCommunicator, or None with one rank.
        shape: Of every tensor that stages exchange.
        sent: Called with an output once its send has ended for the stream.
    """

    def __init__(
        self, communicator: Any, shape: tuple[int, ...], sent: Callable[[torch.Tensor], None]
    ) -> None:
        self._communicator = communicator
        self._shape = shape
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
        tensor, requests = self._receives.pop((op, (stage, microbatch)))
        _wait(requests)
        return tensor

    def run(self, action: Action) -> None:
        """Post a send or a receive."""
        key = (action.stage, action.microbatch)
        if action.op in (Op.RECV_F, Op.RECV_B):
            self._receives[action.op, key] = self._post(action.op, None)
            return
        self._end_send(action.op)
        tensor = self._made.pop((action.op, key))
        _, requests = self._post(action.op, tensor)
        self._sends[action.op] = (key, tensor, requests)

    def end(self) -> None:
        """Wait for the sends that are left."""
        for op in list(self._sends):
            self._end_send(op)

    def _end_send(self, op: Op) -> None:
        if op in self._sends:
            _, tensor, requests = self._sends.pop(op)
            _wait(requests)
            if op is Op.SEND_F:
                self._sent(tensor)

    def _post(self, op: Op, tensor: torch.Tensor | None) -> tuple[Any, Any]:
        post = (
            self._communicator.send_forward_recv_forward
            if op in (Op.SEND_F, Op.RECV_F)
            else self._communicator.send_backward_recv_backward
        )
        received: tuple[Any, Any] = post(tensor, tensor is None, self._shape, overlap_p2p_comm=True)
        return received


def _wait(requests: Any) -> None:
    """Have the current stream wait, or the host where the transport has no streams."""
    handles: Iterable[Any] = requests.values() if isinstance(requests, dict) else requests or ()
    for handle in handles:
        handle.wait()
