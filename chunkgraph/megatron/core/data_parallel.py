"""Run the hooks and signals of Megatron's DistributedDataParallel (DDP) around replays."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from chunkgraph.engine import GradientMarker
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import private_names
from chunkgraph.megatron.core.releases import RANGE

__all__ = [
    "DDP_MODULE",
    "call_parameter_gather_hooks",
    "gathers_parameters",
    "gradient_marker",
    "has_parameter_gather_hook",
    "is_fully_sharded",
    "unwrap_ddp",
]

DDP_MODULE = "megatron.core.distributed.distributed_data_parallel"
"""Name of the module that defines DDP's forward pre-hooks."""


def unwrap_ddp(chunk: nn.Module) -> nn.Module | None:
    """Return Megatron's DistributedDataParallel among the wrappers of ``chunk``, or None."""
    (ddp_class,) = private_names(DDP_MODULE, "DistributedDataParallel")
    module: Any = chunk
    while isinstance(module, nn.Module):
        if isinstance(module, ddp_class):
            return module
        module = getattr(module, "module", None)
    return None


def is_fully_sharded(chunk: nn.Module) -> bool:
    """Return whether any wrapper of ``chunk`` shards its parameters (any flavour of FSDP)."""
    module: Any = chunk
    while isinstance(module, nn.Module):
        kind = type(module)
        where = f"{kind.__module__}.{kind.__name__}".lower()
        if "fsdp" in where or "fullysharded" in where or "fully_sharded" in where:
            return True
        module = getattr(module, "module", None)
    return False


def gathers_parameters(ddp: nn.Module) -> bool:
    """Return whether ``ddp`` gathers parameters in forward pre-hooks (overlap_param_gather)."""
    return bool(getattr(getattr(ddp, "ddp_config", None), "overlap_param_gather", False))


def has_parameter_gather_hook(module: nn.Module) -> bool:
    """Return whether a call of ``module`` makes DDP gather parameters.

    DDP removes its hooks at times, for example to evaluate.
    """
    return any(
        getattr(hook, "__module__", None) == DDP_MODULE
        for hook in module._forward_pre_hooks.values()
    )


def call_parameter_gather_hooks(modules: Sequence[nn.Module]) -> None:
    """Run DDP's forward pre-hooks of ``modules``, which a replay does not run.

    DDP adds and removes these hooks between steps, so every call looks them up again.
    """
    for module in modules:
        for hook in list(module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", None) == DDP_MODULE:
                hook(module, ())


def gradient_marker(
    ddp: nn.Module, parameters: Sequence[nn.Parameter]
) -> Callable[[], GradientMarker] | None:
    """Return a factory of one slot's signals to ``ddp`` that gradients are accumulated.

    Args:
        ddp: Megatron's DDP around the chunk.
        parameters: The parameters in the order of the indices that the marker receives.

    Returns:
        A function that makes the marker of one slot; None if DDP needs no such signal (without
        overlap_grad_reduce it reduces at the end of the step).

    Raises:
        ConfigError: DDP keeps its gradient buckets under unknown names.
    """
    ddp_config = getattr(ddp, "ddp_config", None)
    groups = getattr(ddp, "param_to_bucket_group", None)
    if ddp_config is None or groups is None:
        raise ConfigError(
            f"{type(ddp).__qualname__} has no ddp_config or param_to_bucket_group: this release of "
            f"megatron-core keeps its gradient buckets elsewhere. Use {RANGE}."
        )
    if not ddp_config.overlap_grad_reduce:
        return None
    targets = [(groups[p], p) if p in groups else None for p in parameters]
    on_gpu = any(p.is_cuda for p in parameters)
    stream = torch.cuda.Stream() if on_gpu else None
    return lambda: _BucketSignals(ddp, targets, stream)


class _BucketSignals:
    """Start the reduction of each bucket group when a slot's backward wrote its last gradient.

    The capture records an external event after the last gradient of every bucket group.
    (Recomputation may accumulate one parameter's gradient in several parts; the event then follows
    the last part.) After a replay, the signals of a group are sent on a side stream that waits for
    this event only, so that the reduction overlaps with the rest of the backward. A CPU has no
    events; there the signals follow the replay. Bucket groups ignore signals before the last
    microbatch, so none are sent then.
    """

    def __init__(
        self,
        ddp: Any,
        targets: Sequence[tuple[Any, nn.Parameter] | None],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._ddp = ddp
        self._targets = targets
        self._stream = stream
        self._missing: dict[int, set[int]] = {}
        members: dict[int, tuple[Any, list[nn.Parameter]]] = {}
        for index, target in enumerate(targets):
            if target is not None:
                group, parameter = target
                members.setdefault(id(group), (group, []))[1].append(parameter)
                self._missing.setdefault(id(group), set()).add(index)
        self._members = members
        self._ready: dict[int, torch.cuda.Event | None] = {}
        self._takes_force = all(
            "force_all_reduce" in inspect.signature(group.register_grad_ready).parameters
            for group, _ in members.values()
        )

    def accumulated(self, index: int) -> None:
        target = self._targets[index]
        if target is None:
            return
        key = id(target[0])
        self._missing[key].discard(index)
        if self._missing[key]:
            return
        event: torch.cuda.Event | None = None
        if self._stream is not None:
            event = torch.cuda.Event(external=True)
            event.record()
        self._ready.pop(key, None)
        self._ready[key] = event

    def replayed(self) -> None:
        if not any(self._members[key][0].is_last_microbatch for key in self._ready):
            return
        force = (getattr(self._ddp, "force_all_reduce", False),) if self._takes_force else ()
        for key, event in self._ready.items():
            group, parameters = self._members[key]
            with contextlib.ExitStack() as stack:
                if event is not None:
                    assert self._stream is not None
                    self._stream.wait_event(event)
                    stack.enter_context(torch.cuda.stream(self._stream))
                for parameter in parameters:
                    group.register_grad_ready(parameter, *force)
