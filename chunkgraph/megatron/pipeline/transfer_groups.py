"""Process groups of the transfers between pipeline stages, one for each direction."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from chunkgraph.megatron.core.p2p import Direction

__all__ = ["TransferGroups"]

_MAX_CTAS = 2


class TransferGroups:
    """Groups of a pipeline's forward and backward transfers.

    A transfer of one direction never waits for one of the other. A schedule posts a receive long
    before its tensor is sent, and NCCL's kernel then waits on the GPU next to those that compute;
    with as many blocks as it takes by default it makes them up to a tenth slower. So each kernel
    of these groups has two blocks.

    Every process of the job creates them together.

    Args:
        pipeline: Megatron's pipeline group of this process.
    """

    def __init__(self, pipeline: Any) -> None:
        own_ranks = dist.get_process_group_ranks(pipeline)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own_ranks)
        pairs = {
            ranks: [_new_group(ranks, dist.get_backend(pipeline)) for _ in range(2)]
            for ranks in sorted({tuple(ranks) for ranks in every})
        }
        self._forward, self._backward = pairs[tuple(own_ranks)]
        place = own_ranks.index(dist.get_rank())
        self._next = own_ranks[(place + 1) % len(own_ranks)]
        self._previous = own_ranks[place - 1]

    def route(self, direction: Direction) -> tuple[Any, int, int]:
        """Return a direction's group, the rank to send to, and the rank to receive from."""
        if direction is Direction.FORWARD:
            return self._forward, self._next, self._previous
        return self._backward, self._previous, self._next

    def close(self) -> None:
        """Destroy the groups."""
        if dist.is_initialized():
            dist.destroy_process_group(self._forward)
            dist.destroy_process_group(self._backward)


def _new_group(ranks: tuple[int, ...], backend: str) -> Any:
    options = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = _MAX_CTAS
    return dist.new_group(list(ranks), backend=backend, pg_options=options)
