"""Megatron's forward step of the training command, and its losses."""

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
    """Run a microbatch through ``chunk``; return its output and its loss function."""
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
    if "loss_scale" in batch:
        return output, partial(_share_of_step, batch["is_counted"], batch["loss_scale"])
    if "is_counted" in batch:
        return output, partial(_mean_of, batch["is_counted"], batch.get("num_counted"))
    return output, partial(_masked_mean, batch["loss_mask"], batch.get("num_labels"))


def _mean_of(
    is_counted: torch.Tensor, num_counted: int | None, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Average the loss over the rows that hold a token.

    Other rows are removed by selection: a factor 0 would pass a NaN on.

    ``num_counted`` is the number of rows on all context-parallel ranks; the result is then this
    rank's share of the mean, as in `_masked_mean`.
    """
    total = losses.float().masked_fill(~is_counted, 0.0).sum()
    loss = total / (is_counted.sum().clamp(min=1) if num_counted is None else num_counted)
    return loss, {"lm loss": loss.detach().clone()}


def _share_of_step(
    is_counted: torch.Tensor, scale: float, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the share of this rank and microbatch in the step's mean loss per token.

    Rows without a token are removed by selection. The scale undoes the means over microbatches (in
    the schedule) and over ranks (in DDP), which count documents on several ranks more than once.
    """
    loss = losses.float().masked_fill(~is_counted, 0.0).sum() * scale
    return loss, {"lm loss": loss.detach().clone()}


def _masked_mean(
    loss_mask: torch.Tensor, num_labels: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Average the loss over the labels that count; ``losses`` and ``loss_mask`` are [b, s].

    ``num_labels`` is the number of labels on all context-parallel ranks; the result is then this
    rank's share of the mean. The schedule multiplies it by the number of these ranks before DDP
    averages gradients over them.
    """
    if num_labels is None:
        num_labels = loss_mask.sum()
    loss = (losses.float() * loss_mask).sum() / num_labels.clamp(min=1.0)
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
