"""Overlap the gathering of parameters (``overlap_param_gather``) with a replayed forward.

In an eager forward, a pre-hook of every module waits for the all-gather of the bucket that holds
the module's parameters, and starts the next all-gather. A replay calls no hooks. If all hooks ran
on the compute stream before the replay, the whole forward would wait for the last all-gather.
Instead they run on a side stream that records an external event after every bucket, and the
captured forward waits for each event where the bucket's first layer begins.
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
    """Make one chunk's captured forward wait for parameters where it first uses them.

    Args:
        ddp: Megatron's DDP around the chunk.
        module: The captured module of the chunk, on a CUDA device.
        layers: Submodules that wait for all of their parameters when they begin. A module outside
            of them waits for the parameters that it holds directly.
    """

    def __init__(self, ddp: Any, module: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._stream = torch.cuda.Stream()
        group_of = ddp.param_to_bucket_group
        self._groups: dict[int, Any] = {}
        self._events: dict[int, torch.cuda.Event] = {}
        # Every module, with the bucket groups that no earlier module uses.
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
        """Before a replay, run DDP's hooks on the side stream: start gathers and wait for them.

        The side stream first waits for the work queued so far (the optimizer's writes).
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
    def wait_in_capture(self) -> Iterator[None]:
        """Make modules wait for their parameters in a capture, and its end for all others.

        Outside of a capture this does nothing.
        """
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
    """Return an external event that a capture can wait for.

    torch creates the event when it is first recorded. Waiting for an event that was never recorded
    does nothing, so the capture would contain no wait.
    """
    event = torch.cuda.Event(external=True)
    event.record()
    return event


def _groups(
    parameters: Iterable[nn.Parameter], group_of: dict[nn.Parameter, Any]
) -> dict[int, Any]:
    """Return the bucket groups of ``parameters`` by identity, in order."""
    groups = [group_of[p] for p in parameters if p in group_of]
    return {id(group): group for group in groups}


def _is_outstanding(group: Any) -> bool:
    """Return whether the gather of a bucket group has not finished, or has not started."""
    return getattr(group, "param_gather_handle", group) is not None or not getattr(
        group, "param_gather_dispatched", False
    )
