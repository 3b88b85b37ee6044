"""Gathers the rows of all ranks, for the attention of tests with a context-parallel group."""

from __future__ import annotations

from typing import Any

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
