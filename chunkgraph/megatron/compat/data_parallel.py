"""Megatron's DistributedDataParallel: its hooks and signals, given by hand around replays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.compat.access import private_names

__all__ = [
    "DDP_MODULE",
    "call_parameter_gather_hooks",
    "grad_ready_signal",
    "is_fully_sharded",
    "unwrap_ddp",
]

DDP_MODULE = "megatron.core.distributed.distributed_data_parallel"
"""The module that DDP's forward pre-hooks come from."""


def unwrap_ddp(chunk: nn.Module) -> nn.Module | None:
    """Megatron's DistributedDataParallel among the wrappers of ``chunk``, or None."""
    (ddp_class,) = private_names(DDP_MODULE, "DistributedDataParallel")
    module: Any = chunk
    while isinstance(module, nn.Module):
        if isinstance(module, ddp_class):
            return module
        module = getattr(module, "module", None)
    return None


def is_fully_sharded(chunk: nn.Module) -> bool:
    """Whether any wrapper of ``chunk`` shards its parameters (any flavour of FSDP)."""
    module: Any = chunk
    while isinstance(module, nn.Module):
        kind = type(module)
        where = f"{kind.__module__}.{kind.__name__}".lower()
        if "fsdp" in where or "fullysharded" in where or "fully_sharded" in where:
            return True
        module = getattr(module, "module", None)
    return False


def call_parameter_gather_hooks(modules: Sequence[nn.Module]) -> None:
    """Run DDP's forward pre-hooks of ``modules`` by hand; a replay would not.

    DDP adds and takes away these hooks between steps, so they are looked up at every call.
    """
    for module in modules:
        for hook in list(module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", None) == DDP_MODULE:
                hook(module, ())


def grad_ready_signal(
    ddp: nn.Module, parameters: Sequence[nn.Parameter]
) -> Callable[[], None] | None:
    """A function that tells ``ddp`` that the gradients of ``parameters`` are accumulated.

    Returns None where DDP wants no such signal (without overlap_grad_reduce it reduces at the
    step's end). The bucket groups themselves ignore it but for the last microbatch.
    """
    ddp_config = getattr(ddp, "ddp_config", None)
    groups = getattr(ddp, "param_to_bucket_group", None)
    if ddp_config is None or groups is None:
        raise ConfigError(
            f"{type(ddp).__qualname__} has no ddp_config or param_to_bucket_group: this release of "
            "megatron-core keeps its gradient buckets elsewhere. Use 0.16 to 0.19."
        )
    if not ddp_config.overlap_grad_reduce:
        return None
    targets = [(groups[parameter], parameter) for parameter in parameters if parameter in groups]
    takes_force = all(
        "force_all_reduce" in inspect.signature(group.register_grad_ready).parameters
        for group, _ in targets
    )

    def signal() -> None:
        if takes_force:
            force = getattr(ddp, "force_all_reduce", False)
            for group, parameter in targets:
                group.register_grad_ready(parameter, force)
        else:
            for group, parameter in targets:
                group.register_grad_ready(parameter)

    return signal
