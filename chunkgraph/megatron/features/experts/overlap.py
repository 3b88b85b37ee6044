"""Train without Megatron's overlap of the transfers of experts, equal to it to the last bit.

The overlap mixes the forward of a microbatch with the backward of another, and a graph holds one.
It changes no computation, but it differentiates embedding and output layer one after the other:
if one stage uses a weight in both, its two gradients are added to ``main_grad`` one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from chunkgraph.settings.rule import Facts, Rule

_OVERLAP = "overlap_moe_expert_parallel_comm"


def _rounds_otherwise(f: Facts) -> bool:
    """Return whether a stage uses the embedding's weight in a way that `_Separate` does not add."""
    is_tied = not f.untie_embeddings_and_output_weights
    is_one_stage = (f.pipeline_model_parallel_size or 1) == 1
    if is_tied and is_one_stage and not f.mtp_num_layers:
        return bool(f.gradient_accumulation_fusion or f.use_megatron_fsdp)
    return is_tied + bool(f.mtp_num_layers) + is_one_stage > 1


OVERLAP_RULES = (
    Rule(
        f"{_OVERLAP}: graphs train without it, which adds up the gradients of an embedding that a "
        "stage uses twice with other roundings; leave it out",
        lambda f: getattr(f, _OVERLAP) and _rounds_otherwise(f),
    ),
)


def turn_off_overlap(modules: Iterable[Any], undo: ExitStack) -> str | None:
    """Train without the overlap; keep its sums of gradients.

    Megatron checks the environment of a run with it, so arguments keep it.

    Args:
        modules: Modules of the model chunks, of which a tied output layer is changed.
        undo: Closed at the end of training; restores the output layer.

    Returns:
        A line about it; None if it was off.
    """
    modules = list(modules)
    configs = {id(m.config): m.config for m in modules if getattr(m, "config", None) is not None}
    overlapped = [config for config in configs.values() if getattr(config, _OVERLAP, False)]
    for config in overlapped:
        setattr(config, _OVERLAP, False)
    if not overlapped:
        return None
    for model in modules:
        if _is_tied_stage(model):
            layer = model.output_layer
            layer.forward = partial(_forward, type(layer).forward, layer)
            undo.callback(layer.__dict__.pop, "forward", None)
    return (
        f"chunk graphs: training runs without --{_OVERLAP.replace('_', '-')}, with the same "
        "results: it mixes the forward of a microbatch with the backward of another, and a graph "
        "holds one."
    )


def _is_tied_stage(model: Any) -> bool:
    """Return whether the model has the embedding and the output layer that uses its weight."""
    is_tied = getattr(model, "share_embeddings_and_output_weights", False)
    return bool(is_tied and model.pre_process and model.post_process)


def _forward(forward: Any, layer: Any, hidden: Any, weight: Any = None, **kwargs: Any) -> Any:
    """Run the output layer, whose weight gradient is added separately."""
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        weight = _Separate.apply(weight)
    return forward(layer, hidden, weight=weight, **kwargs)


class _Separate(torch.autograd.Function):
    """Add the gradient of one use of a weight to its ``main_grad``, as autograd's leaf would."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> torch.Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        ctx.weight.main_grad.add_(grad)
