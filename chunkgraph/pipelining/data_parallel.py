"""Support torch's DDP and FSDP2 around a stage's module; both reduce gradients after a step.

Of a module in FSDP2 (``fully_shard``), graphs use the unsharded parameters, whose storage torch
2.15 and newer can keep. The parameters are gathered at the start of a step and stay gathered until
its end. Torch then reduces the gradients as it does without graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from chunkgraph.engine import CaptureOptions
from chunkgraph.errors import ConfigError

# FSDP2 of torch 2.15 has public names for keeping, gathering and resharding parameters, but none to
# switch to gathered ones without another gather (`_to_unsharded`), to mark gradients as computed
# where no hook ran (`_post_backward_pending`; `finalize_backward` skips the others), and to limit
# hooks to casts (`_training_state`). `_get_fsdp_state` and `_fsdp_param_groups` lead to these.
_REMEDY = "Use DistributedDataParallel, or replicate the stage."
_METHODS = ("set_keep_unsharded_storage", "set_manual_backward_finalization", "_get_fsdp_state")


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
        _refuse_unsupported(module, label)
        return module
    for name, part in module.named_modules():
        _refuse_inner(part, f"{label}: {name or 'the module'}")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"{label}: {name} is a DTensor, whose local tensor is new in every call, so "
                "no graph can hold its address. Pass a module of plain tensors."
            )
    return module


def _refuse_unsupported(module: Any, label: str) -> None:
    """Refuse a sharded stage whose parameters cannot be kept in place.

    Raises:
        ConfigError: The stage is refused; the message names the reason.
    """
    missing = [name for name in _METHODS if not hasattr(FSDPModule, name)]
    if missing:
        raise ConfigError(
            f"{label} is sharded by fully_shard (FSDP2). torch {torch.__version__} has no "
            f"FSDPModule.{missing[0]}: it frees unsharded parameters, and graphs need them where "
            f"they were. Use torch 2.15. {_REMEDY}"
        )
    for group in _groups(module):
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            raise ConfigError(
                f"{label} is sharded by fully_shard with {group.offload_policy}, which moves "
                "parameters to the CPU; graphs need them where they were. Leave offload_policy "
                "out."
            )


def _refuse_inner(module: nn.Module, name: str) -> None:
    """Refuse a sharded part of a stage that is not sharded itself.

    Raises:
        ConfigError: The part is sharded.
    """
    if isinstance(module, FullyShardedDataParallel):
        raise ConfigError(
            f"{name} is in FullyShardedDataParallel, which frees its parameters' memory after "
            f"every forward; a graph needs it where it was. {_REMEDY}"
        )
    if isinstance(module, FSDPModule):
        _refuse_unsupported(module, name)
        raise ConfigError(
            f"{name} is sharded by fully_shard (FSDP2), but the stage's own module is not, so that "
            "torch's schedules would reduce its gradients after every backward. Apply fully_shard "
            "to the stage's module too."
        )


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


def gather(module: Any) -> None:
    """Gather all parameters into memory that stays the same for the graphs."""
    module.set_keep_unsharded_storage(True)
    for part in _sharded_parts(module):
        part.unshard()


def hold_gathered(module: Any) -> None:
    """Point the module at the parameters gathered in this step, without gathering again.

    Torch reshards a module in a step in which it infers shapes or has reduced gradients.
    """
    for group in _groups(module):
        group._to_unsharded()


def reshard(module: Any) -> None:
    """Point the module at its own shards."""
    for part in _sharded_parts(module):
        part.reshard()


@contextmanager
def casting_only(module: Any, label: str) -> Iterator[None]:
    """Limit FSDP's hooks to casts of inputs and outputs, as in a recomputed forward.

    Raises:
        ConfigError: A parameter is a DTensor even after it is gathered.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"{label}: {name} is a DTensor after fully_shard has gathered it. Leave tensor "
                "parallelism out of the stage."
            )
    states = [part._get_fsdp_state() for part in _sharded_parts(module)]
    before = [state._training_state for state in states]
    try:
        for state in states:
            state._training_state = TrainingState.PRE_BACKWARD
        yield
    finally:
        for state, mode in zip(states, before, strict=True):
            state._training_state = mode


def finish_backwards(module: Any) -> None:
    """Mark all gradients as computed, since replays do not run FSDP's hooks."""
    for group in _groups(module):
        group._post_backward_pending = True


def _sharded_parts(module: Any) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _groups(module: Any) -> list[Any]:
    parts = _sharded_parts(module)
    return [group for part in parts for group in part._get_fsdp_state()._fsdp_param_groups]
