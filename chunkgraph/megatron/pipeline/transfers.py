"""Tensors between the stages of a pipeline, sent and received without waiting.

Megatron's P2PCommunicator does not carry them: it allocates each tensor that it receives, where a
replay needs it in a slot. With two ranks it moves half of the transfers to the group of the whole
job, so that no link has a group, and buffers, of its own.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from chunkgraph.engine.agreement import new_group
from chunkgraph.megatron.core.p2p import Direction

# NCCL_BUFFSIZE: what one block of a kernel can send before the receive is posted.
_BLOCK_BUFFER_BYTES = 4 * 2**20


class Route(NamedTuple):
    """Where the transfers of one direction of one rank go.

    Attributes:
        sends: Process group of the sends.
        target: Rank to send to.
        receives: Process group of the receives.
        source: Rank to receive from.
    """

    sends: Any
    target: int
    receives: Any
    source: int


class TransferGroups:
    """Groups of a pipeline's transfers.

    Transfers of one group run one after another. Each link, from one sender to one receiver in one
    direction, has a group that no other link of either rank uses, so transfers wait only for
    others of the same link.

    A kernel of NCCL that waits for the other rank takes multiprocessors from the kernels that
    compute. A receive does not wait long: it is posted where its tensor is used. Before that, a
    rank of 1F1B or ZB-H1 seldom has a free slot for it. A send does not wait if the buffers of its
    blocks take the whole tensor, so the groups have as many blocks as that needs.

    Every process of the job creates them together.

    Args:
        pipeline: Megatron's pipeline group of this process.
        message_bytes: Size of a tensor that stages exchange, the same on all ranks.

    Attributes:
        routes: Where this rank's transfers of each direction go.
    """

    def __init__(self, pipeline: Any, message_bytes: int) -> None:
        own_ranks = dist.get_process_group_ranks(pipeline)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own_ranks)
        backend = dist.get_backend(pipeline)
        size = len(own_ranks)
        # A rank and both of its neighbours send in different groups.
        colors = [place % 2 for place in range(size)]
        if size % 2:
            colors[-1] = 2
        for ranks in sorted({tuple(ranks) for ranks in every}):
            groups = {
                (direction, color): _new_group(ranks, backend, message_bytes)
                for direction in Direction
                for color in sorted(set(colors))
            }
            if ranks == tuple(own_ranks):
                self._groups = groups
        place = own_ranks.index(dist.get_rank())
        self.routes = {}
        for direction, step in ((Direction.FORWARD, 1), (Direction.BACKWARD, -1)):
            target, source = (place + step) % size, (place - step) % size
            self.routes[direction] = Route(
                self._groups[direction, colors[place]],
                own_ranks[target],
                self._groups[direction, colors[source]],
                own_ranks[source],
            )

    def close(self) -> None:
        """Destroy the groups."""
        if dist.is_initialized():
            for group in self._groups.values():
                dist.destroy_process_group(group)


def _new_group(ranks: tuple[int, ...], backend: str, message_bytes: int) -> Any:
    options = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = _num_ctas(message_bytes)
    return new_group(list(ranks), backend=backend, pg_options=options)


def _num_ctas(message_bytes: int) -> int:
    """Return the number of blocks of a communicator whose sends need not wait for the receiver.

    NCCL gives a transfer half of them.
    """
    num_buffers = -(-message_bytes // _BLOCK_BUFFER_BYTES)
    return min(max(2 << (num_buffers - 1).bit_length(), 4), 32)


class Exchange:
    """The transfers of one direction of one rank in one step.

    The stream that takes a received tensor waits for it; no stream waits for a send before it is
    known to have ended. Neighbouring stages are on different ranks. The keys of tensors are their
    stage and microbatch.

    Args:
        route: Where the transfers go; None with one rank.
    """

    def __init__(self, route: Route | None) -> None:
        self._route = route
        self._receives: dict[tuple[int, int], tuple[torch.Tensor, Any]] = {}
        self._made: dict[tuple[int, int], torch.Tensor] = {}
        self._pending: deque[tuple[torch.Tensor, Any]] = deque()
        self._num_ended = 0

    def keep(self, key: tuple[int, int], tensor: torch.Tensor) -> None:
        """Keep a tensor until it is sent."""
        self._made[key] = tensor

    def send(self, key: tuple[int, int]) -> None:
        """Post the send of a kept tensor."""
        assert self._route is not None
        tensor = self._made.pop(key)
        request = dist.isend(tensor, self._route.target, self._route.sends)
        self._pending.append((tensor, request))

    def receive(self, key: tuple[int, int], memory: torch.Tensor) -> None:
        """Post a receive into ``memory``."""
        assert self._route is not None
        request = dist.irecv(memory, self._route.source, self._route.receives)
        self._receives[key] = memory, request

    def take(self, key: tuple[int, int]) -> torch.Tensor:
        """Return a received tensor; the current stream waits for it."""
        tensor, request = self._receives.pop(key)
        request.wait()
        return tensor

    def end(self, num_sends: float = math.inf) -> list[torch.Tensor]:
        """Wait until this number of the step's sends have ended; return those that were open."""
        ended = []
        while self._pending and self._num_ended < num_sends:
            tensor, request = self._pending.popleft()
            self._num_ended += 1
            request.wait()
            ended.append(tensor)
        return ended
