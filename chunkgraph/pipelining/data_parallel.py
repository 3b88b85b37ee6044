"""Support torch's DDP and FSDP2 around a stage's module; both reduce gradients after a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from chunkgraph.engine import CaptureOptions
from chunkgraph.errors import ConfigError
from chunkgraph.pipelining.sharded import refuse_inner, refuse_unsupported

__all__ = ["reduce_gradients", "refuse_too_few_steps", "unwrapped"]


def refuse_too_few_steps(module: nn.Module, options: CaptureOptions) -> None:
    """Refuse a capture before the stage's wrapper is set up.

    Raises:
        ConfigError: The wrapper needs more eager steps.
    """
    needs, why = 0, ""
    if isinstance(module, DistributedDataParallel):
        needs, why = 2, "in DistributedDataParallel, which arranges its buckets in the second step"
    elif isinstance(module, FSDPModule):
        needs, why = 1, "sharded by fully_shard (FSDP2), which is set up in the first step"
    if options.num_warmup_steps < needs:
        raise ConfigError(
            f"A stage is {why}. Pass options=CaptureOptions(num_warmup_steps={needs}), or more."
        )


def unwrapped(module: nn.Module, label: str) -> nn.Module:
    """Return the module whose forward is captured.

    Raises:
        ConfigError: Replays do not support the module's wrapper or a parameter.
    """
    if isinstance(module, DistributedDataParallel):
        for option in ("find_unused_parameters", "static_graph", "mixed_precision"):
            if getattr(module, option):
                raise ConfigError(
                    f"{label}: DistributedDataParallel({option}=...) follows the backward's graph "
                    "of autograd, which a replay does not build. Leave the option out, or pass the "
                    "wrapped module itself and reduce the gradients after the step."
                )
        module = module.module
    if isinstance(module, FSDPModule):
        refuse_unsupported(module, label)
        return module
    for name, part in module.named_modules():
        refuse_inner(part, f"{label}: {name or 'the module'}")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"{label}: {name} is a DTensor, whose local tensor is new in every call, so "
                "no graph can hold its address. Pass a module of plain tensors."
            )
    return module


def reduce_gradients(wrapper: Any) -> None:
    """Reduce ``.grad`` of all parameters, as DDP does in the last backward of a step.

    Autograd hooks on the parameters report gradients to DDP's reducer; replays do not run these
    hooks. This function runs a backward that reaches all parameters and adds nothing.

    Args:
        wrapper: A DistributedDataParallel.
    """
    wrapper.reducer.prepare_for_backward([])
    parameters = [p for p in wrapper.parameters() if p.requires_grad]
    _NoGradients.apply(*parameters).backward()


class _NoGradients(torch.autograd.Function):
    """Reach the inputs in the backward, without gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.num_parameters = len(parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, ...]:
        return (None,) * ctx.num_parameters
