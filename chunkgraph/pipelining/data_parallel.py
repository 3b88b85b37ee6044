"""Data parallelism around a stage's module: torch's DDP goes on reducing, the rest is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from chunkgraph.engine import CaptureOptions
from chunkgraph.errors import ConfigError

__all__ = ["reduce_gradients", "refuse_with_ddp", "unwrapped"]

_MIN_WARMUP_STEPS = 2  # DDP's second forward puts gradients into other buckets


def refuse_with_ddp(options: CaptureOptions, *, is_split: bool) -> None:
    """Refuse what stages in torch's DistributedDataParallel cannot go with.

    Raises:
        ConfigError: naming it.
    """
    if is_split:
        raise ConfigError(
            "The schedule splits backwards, and a stage is in DistributedDataParallel, which "
            "reduces gradients at the end of a whole backward; torch never reduces those of a "
            "split one. Use a schedule of whole backwards, or reduce the gradients after the step."
        )
    if options.num_warmup_steps < _MIN_WARMUP_STEPS:
        raise ConfigError(
            "A stage is in DistributedDataParallel, which arranges its buckets in the second step. "
            f"Give options=CaptureOptions(num_warmup_steps={_MIN_WARMUP_STEPS}), or more."
        )


def unwrapped(module: nn.Module, label: str) -> nn.Module:
    """Return the module whose forward is captured.

    Raises:
        ConfigError: it is in a wrapper that a replay cannot serve.
    """
    if isinstance(module, DistributedDataParallel):
        for option in ("find_unused_parameters", "static_graph", "mixed_precision"):
            if getattr(module, option):
                raise ConfigError(
                    f"{label}: DistributedDataParallel({option}=...) follows the backward's graph "
                    "of autograd, which a replay does not build. Leave the option out, or give the "
                    "stage the module in it and reduce the gradients after the step."
                )
        module = module.module
    for name, part in module.named_modules():
        if isinstance(part, (FSDPModule, FullyShardedDataParallel)):
            raise ConfigError(_refused_fsdp(f"{label}: {name or 'the module'}", part))
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"{label}: {name} is a DTensor, whose local tensor is made again in every call, so "
                "that no graph can hold its address. Give the stage a module of plain tensors."
            )
    return module


def _refused_fsdp(name: str, module: object) -> str:
    how = "Use DistributedDataParallel, or replicate the stage."
    if not isinstance(module, FSDPModule):
        return (
            f"{name} is in FullyShardedDataParallel, which frees its parameters' memory after "
            f"every forward; a graph needs it where it was. {how}"
        )
    if not hasattr(module, "set_keep_unsharded_storage"):
        return (
            f"{name} is sharded by fully_shard (FSDP2). torch {torch.__version__} frees unsharded "
            "parameters after every forward; only torch 2.15 and newer can keep their storage "
            f"(FSDPModule.set_keep_unsharded_storage), which graphs need. {how}"
        )
    return (
        f"{name} is sharded by fully_shard (FSDP2), which is not supported: its hooks, which "
        f"gather parameters and reduce gradients, would be captured with the module. {how}"
    )


def reduce_gradients(wrapper: Any) -> None:
    """Reduce ``.grad`` of all parameters, as DDP does in the last backward of a step.

    DDP's reducer hears of gradients from hooks of autograd on the parameters, which a replay does
    not reach. Here a backward reaches all of them and adds nothing.

    Args:
        wrapper: a DistributedDataParallel.
    """
    wrapper.reducer.prepare_for_backward([])
    parameters = [p for p in wrapper.parameters() if p.requires_grad]
    _NoGradients.apply(*parameters).backward()


class _NoGradients(torch.autograd.Function):
    """Comes to its inputs in the backward, with no gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.num_parameters = len(parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, ...]:
        return (None,) * ctx.num_parameters
