"""Collectives of tests that gloo or Megatron lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class Gather(torch.autograd.Function):
    """The rows of all ranks of a group, in their order; its backward adds their gradients up."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.num_rows = group, rows.size(0)
        every = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, rows.contiguous(), group=group)
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.num_rows
        return total[first : first + ctx.num_rows].clone(), None


def of_ranks(mine: Any) -> list[Any]:
    """Return what each rank passes."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


@contextmanager
def uneven_collectives() -> Iterator[None]:
    """Let gloo gather, and reduce and scatter, different numbers of rows, as NCCL does."""
    gather_even = dist.all_gather

    def gather(outputs: Sequence[torch.Tensor], rows: torch.Tensor, **options: Any) -> Any:
        most = max(len(output) for output in outputs)
        if all(len(output) == most for output in outputs):
            return gather_even(outputs, rows, **options)
        padded = [output.new_zeros(most, *output.shape[1:]) for output in outputs]
        mine = torch.zeros_like(padded[0])
        mine[: len(rows)] = rows
        gather_even(padded, mine, **options)
        for output, received in zip(outputs, padded, strict=True):
            output.copy_(received[: len(output)])
        return None

    def reduce_scatter(output: torch.Tensor, pieces: Sequence[torch.Tensor], *, group: Any) -> None:
        total = torch.cat(list(pieces))
        dist.all_reduce(total, group=group)
        output.copy_(total.split([len(piece) for piece in pieces])[dist.get_rank(group)])

    with (
        mock.patch.object(dist, "all_gather", gather),
        mock.patch.object(dist, "reduce_scatter", reduce_scatter),
    ):
        yield
