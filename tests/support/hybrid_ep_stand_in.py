"""Stands for HybridEP's kernels between CPU ranks, so that Megatron's manager of it can run.

Every rank receives all tokens and selects the rows of its experts. Rows without a number are as
many as the chosen ones; otherwise unused rows are NaN, and rows that exceed the number are omitted
with a flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.experts import hybrid_ep as needs
from chunkgraph.megatron.features.experts.dropless_rows import ChosenRows

_MOE = "megatron.core.transformer.moe."


@contextmanager
def hybrid_ep(*, is_on: bool = True) -> Iterator[None]:
    """Let models dispatch by HybridEP on CPU ranks, if ``is_on``."""
    if not is_on:
        yield
        return
    limits = SimpleNamespace(max_num_of_tokens_per_rank=0)
    buffer = SimpleNamespace(configurer=SimpleNamespace(buffer_config=limits))
    with ExitStack() as stack:
        for target, name, value in (
            (import_megatron(f"{_MOE}token_dispatcher"), "hybrid_ep_dispatch", _dispatch),
            (import_megatron(f"{_MOE}token_dispatcher"), "hybrid_ep_combine", _combine),
            (import_megatron(f"{_MOE}fused_a2a"), "_hybrid_ep_buffer", buffer),
            (needs, "deep_ep_version", lambda: "1.2.1"),
            (needs, "has_hybrid_ep", lambda: True),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def _dispatch(
    *,
    x: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor,
    group: Any,
    num_local_experts: int,
    num_permuted_tokens: int | None,
    **_options: object,
) -> tuple[Any, ...]:
    first = dist.get_rank(group) * num_local_experts
    chosen = _gathered(routing_map, group)[:, first : first + num_local_experts].contiguous()
    num_rows = num_permuted_tokens
    if num_rows is None:  # wait for it
        num_rows = int(chosen.sum())
    rows = ChosenRows.of(chosen, num_rows, are_exact=num_permuted_tokens is None)
    received, weights = _Dispatch.apply(x, probs, chosen, rows, group, first)
    counts = torch.diff(rows.splits.ends, prepend=rows.splits.ends.new_zeros(1)).to(torch.int32)
    overflow = (chosen.sum() > num_rows).to(torch.int32)
    return received, weights, None, counts, (rows, x.shape[0], group, *[None] * 7, overflow)


def _combine(
    *, x: torch.Tensor, handle: tuple[Any, ...], num_permuted_tokens: Any, **_options: object
) -> torch.Tensor:
    assert int(num_permuted_tokens) == x.shape[0] or x.requires_grad
    rows, num_tokens, group, *_ = handle
    combined: torch.Tensor = _Combine.apply(x, rows, num_tokens, group)
    return combined


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        probs: torch.Tensor,
        chosen: torch.Tensor,
        rows: ChosenRows,
        group: Any,
        first: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.rows, ctx.group, ctx.first, ctx.num_tokens = rows, group, first, x.shape[0]
        ctx.shape = probs.shape
        local = _gathered(probs, group)[:, first : first + chosen.shape[1]]
        weights = local.t().reshape(-1).index_select(0, rows.pairs)
        return _nan_after(_gathered(x, group)[rows.tokens], rows), _nan_after(weights, rows)

    @staticmethod
    def backward(
        ctx: Any, of_rows: torch.Tensor, of_weights: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        num = ctx.num_tokens
        of_x = _summed(of_rows, ctx.rows, num, ctx.group)
        num_local = ctx.rows.splits.ends.shape[0]
        num_all = num * dist.get_world_size(ctx.group)
        of_pairs = of_weights.new_zeros(num_local * num_all)
        of_pairs = of_pairs.index_add(0, ctx.rows.pairs, ctx.rows.clear(of_weights))
        of_probs = of_weights.new_zeros(num_all, ctx.shape[1])
        of_probs[:, ctx.first : ctx.first + num_local] = of_pairs.view(num_local, num_all).t()
        return of_x, _own(of_probs, num, ctx.group), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: ChosenRows, num_tokens: int, group: Any
    ) -> torch.Tensor:
        ctx.rows, ctx.group = rows, group
        return _summed(x, rows, num_tokens, group)

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = _gathered(grads, ctx.group)[ctx.rows.tokens]
        return _nan_after(rows, ctx.rows), None, None, None


def _summed(rows: torch.Tensor, at: ChosenRows, num_tokens: int, group: Any) -> torch.Tensor:
    """Return for each local token the sum of its rows on all ranks."""
    total = rows.new_zeros(num_tokens * dist.get_world_size(group), rows.shape[1])
    return _own(total.index_add(0, at.tokens, at.clear(rows)), num_tokens, group)


def _own(total: torch.Tensor, num_tokens: int, group: Any) -> torch.Tensor:
    """Return the sum over all ranks of this rank's part."""
    dist.all_reduce(total, group=group)
    begin = dist.get_rank(group) * num_tokens
    return total[begin : begin + num_tokens].clone()


def _gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the tensors of all ranks, one after the other."""
    tensor = tensor.detach().contiguous()
    sizes = (tensor.shape[0] * dist.get_world_size(group), *tensor.shape[1:])
    out = tensor.new_empty(sizes)
    dist.all_gather_into_tensor(out, tensor, group=group)
    return out


def _nan_after(rows: torch.Tensor, at: ChosenRows) -> torch.Tensor:
    if at.unused is None:
        return rows
    return rows.masked_fill(at.unused if rows.dim() == 1 else at.unused[:, None], float("nan"))
