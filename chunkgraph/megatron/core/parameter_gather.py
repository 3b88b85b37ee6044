"""Overlapped gathering of parameters (``overlap_param_gather``), seen by a replayed forward.

Eagerly, a forward pre-hook of every module waits for the all-gather of the bucket that holds the
module's parameters, and starts the next one. A replay calls no hooks. Given all at once before the
replay, they would make the whole forward wait for the last all-gather; so they are given on a side
stream, which records an external event behind every bucket, and the captured forward waits for
each event where the bucket's first layer begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from chunkgraph.megatron.core.data_parallel import (
    call_parameter_gather_hooks,
    has_parameter_gather_hook,
)

__all__ = ["ParameterGates"]


class ParameterGates:
    """The points of one chunk's forward at which it waits for gathered parameters.

    Args:
        ddp: Megatron's DDP around the chunk.
        module: what is captured of it, on a CUDA device.
        layers: submodules that wait for all of their parameters when they begin; what lies outside
            of them waits for its own.
    """

    def __init__(self, ddp: Any, module: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._stream = torch.cuda.Stream()
        group_of = ddp.param_to_bucket_group
        self._groups: dict[int, Any] = {}
        self._events: dict[int, torch.cuda.Event] = {}
        # Every module, with the groups that it is the first to use.
        self._hooked: list[tuple[nn.Module, list[int]]] = []
        for submodule in module.modules():
            groups = _groups(submodule.parameters(recurse=False), group_of)
            new = [key for key in groups if key not in self._groups]
            self._groups.update(groups)
            self._events.update((key, _recorded_event()) for key in new)
            self._hooked.append((submodule, new))
        layers = list(layers)
        in_layers = {id(m) for layer in layers for m in layer.modules()}
        gates = [(layer, _groups(layer.parameters(), group_of)) for layer in layers] + [
            (other, _groups(other.parameters(recurse=False), group_of))
            for other in module.modules()
            if id(other) not in in_layers
        ]
        self._gates = [(gate, list(groups)) for gate, groups in gates if groups]

    def gather(self) -> None:
        """Wait for gathers on the side stream, and start what is not started; before a replay.

        The side stream starts behind the work given so far (the optimizer's writes).
        """
        first_module, _ = self._hooked[0]
        if not has_parameter_gather_hook(first_module) or not any(
            _is_outstanding(group) for group in self._groups.values()
        ):
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for module, groups in self._hooked:
                call_parameter_gather_hooks([module])
                for key in groups:
                    self._events[key].record()

    @contextmanager
    def held_by_forward(self) -> Iterator[None]:
        """Inside, in a capture, modules wait for their parameters; at its end for all others."""
        if not torch.cuda.is_current_stream_capturing():
            yield
            return
        left = dict(self._events)

        def wait(keys: Sequence[int]) -> None:
            for key in keys:
                event = left.pop(key, None)
                if event is not None:
                    event.wait()

        def hook(keys: list[int]) -> Any:
            return lambda *_: wait(keys)

        handles = [module.register_forward_pre_hook(hook(keys)) for module, keys in self._gates]
        try:
            yield
            wait(list(left))
        finally:
            for handle in handles:
                handle.remove()


def _recorded_event() -> torch.cuda.Event:
    """An external event that a capture can wait for.

    torch makes an event when it is first recorded; to wait for one that was never recorded does
    nothing, so that a capture would hold no wait at all.
    """
    event = torch.cuda.Event(external=True)
    event.record()
    return event


def _groups(
    parameters: Iterable[nn.Parameter], group_of: dict[nn.Parameter, Any]
) -> dict[int, Any]:
    """The bucket groups of parameters, by identity, in order."""
    found = [group_of[p] for p in parameters if p in group_of]
    return {id(group): group for group in found}


def _is_outstanding(group: Any) -> bool:
    """Whether a bucket group's parameters are not known to be there yet."""
    return getattr(group, "param_gather_handle", group) is not None or not getattr(
        group, "param_gather_dispatched", False
    )
