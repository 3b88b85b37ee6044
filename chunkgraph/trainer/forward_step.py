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
    """Run a microbatch through ``chunk``, as Megatron's forward step; returns its loss function."""
    batch = next(data)
    # Releases without experts on packed sequences do not know the argument.
    only_some = {"padding_mask": batch["padding_mask"]} if "padding_mask" in batch else {}
    output = chunk(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=batch["labels"],
        packed_seq_params=batch.get("packed_seq_params"),
        **only_some,
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

    Others are left out by selection: a factor 0 would let a NaN pass.

    With ``num_counted``, those of all context-parallel ranks, it is this rank's share of the mean,
    as in `_masked_mean`.
    """
    total = losses.float().masked_fill(~is_counted, 0.0).sum()
    loss = total / (is_counted.sum().clamp(min=1) if num_counted is None else num_counted)
    return loss, {"lm loss": loss.detach().clone()}


def _share_of_step(
    is_counted: torch.Tensor, scale: float, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the share of this rank and microbatch in the step's mean loss of a token.

    Rows that hold no token are left out by selection. The scale undoes the means over microbatches
    (the schedule's) and over ranks (DDP's), which count documents on many ranks more often.
    """
    loss = losses.float().masked_fill(~is_counted, 0.0).sum() * scale
    return loss, {"lm loss": loss.detach().clone()}


def _masked_mean(
    loss_mask: torch.Tensor, num_labels: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Average the loss over the labels that count; ``losses`` and ``loss_mask`` are [b, s].

    With ``num_labels``, those of all context-parallel ranks, it is this rank's share of the mean;
    the schedule multiplies it by their number before DDP averages gradients over them.
    """
    if num_labels is None:
        num_labels = loss_mask.sum()
    loss = (losses.float() * loss_mask).sum() / num_labels.clamp(min=1.0)
    return loss, {"lm loss": loss.detach().clone()}


def shared_loss(losses: list[dict[str, torch.Tensor]], device: torch.device) -> float:
    """Average over microbatches and data-parallel ranks, from the last stage to every rank.

    Context-parallel ranks hold shares of it, which are added up.
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
