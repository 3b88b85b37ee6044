"""Megatron's forward step of the training command, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chunkgraph.megatron.core.access import import_megatron

__all__ = ["forward_step", "shared_loss"]


def forward_step(
    data: Iterator[dict[str, Any]], chunk: nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """Run a microbatch through ``chunk``.

    Args:
        data: microbatches, as dictionaries: ``tokens``, ``labels`` and ``position_ids``, int64
            [b, s]; ``is_counted``, bool [b, s], True where the label counts; ``attention_mask``,
            ``packed_seq_params`` and ``padding_mask`` as Megatron's models take them, if any; and
            ``num_counted`` or ``loss_scale``, see `_loss`.
        chunk: one of Megatron's models, wrapped or not.

    Returns:
        The chunk's output, and its loss function.
    """
    batch = next(data)
    # Releases without experts on packed sequences do not have the argument.
    padding = {"padding_mask": batch["padding_mask"]} if "padding_mask" in batch else {}
    output = chunk(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=batch["labels"],
        packed_seq_params=batch.get("packed_seq_params"),
        **padding,
    )
    counted, scale = batch.get("num_counted"), batch.get("loss_scale")
    return output, partial(_loss, batch["is_counted"], counted, scale)


def _loss(
    is_counted: torch.Tensor,
    num_counted: torch.Tensor | int | None,
    scale: float | None,
    losses: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Average the losses that count.

    Others are removed by selection: a factor 0 would pass a NaN on.

    Args:
        is_counted: the losses that count, [b, s].
        num_counted: their number on all context-parallel ranks. The result is then this rank's
            share of the mean, which the schedule multiplies by the number of these ranks before
            DDP averages gradients over them. None: this rank has all of them.
        scale: makes the sum a share of the step's mean loss per token, instead. It undoes the means
            over microbatches (in the schedule) and over ranks (in DDP), which count documents on
            several ranks more than once.
        losses: the losses of all tokens, [b, s].
    """
    total = losses.float().masked_fill(~is_counted, 0.0).sum()
    if scale is not None:
        loss = total * scale
    else:
        loss = total / (is_counted.sum().clamp(min=1) if num_counted is None else num_counted)
    return loss, {"lm loss": loss.detach().clone()}


def shared_loss(losses: list[dict[str, torch.Tensor]], device: torch.device) -> float:
    """Average the losses over microbatches and data-parallel ranks; return it on every rank.

    Context-parallel ranks hold shares of the loss, which are summed.
    """
    state = import_megatron("megatron.core.parallel_state")
    loss = torch.zeros((), dtype=torch.float32, device=device)
    if losses:
        loss = torch.stack([entry["lm loss"] for entry in losses]).mean()
        group = state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:
            dist.all_reduce(loss, group=group)
            loss /= group.size() // state.get_context_parallel_world_size()
    if state.get_pipeline_model_parallel_world_size() > 1:
        source = state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(loss, source, group=state.get_pipeline_model_parallel_group())
    return float(loss)
