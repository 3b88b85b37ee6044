"""Run the hooks and signals of Megatron's DistributedDataParallel (DDP) around replays.

With ``overlap_param_gather``, a pre-hook of every module waits for the all-gather of the bucket
that holds the module's parameters, and starts the next one. A replay calls no hooks. If all hooks
ran on the compute stream before the replay, the whole forward would wait for the last all-gather.
Instead they run on a side stream that records an external event after every bucket, and the
captured forward waits for each event where the bucket's first layer begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkgraph.engine import GradientMarker
from chunkgraph.megatron.core.access import import_megatron, patch_attributes

DDP_MODULE = "megatron.core.distributed.distributed_data_parallel"
"""Name of the module that defines DDP's forward pre-hooks."""


def wrappers_of(chunk: nn.Module) -> Iterator[Any]:
    """Yield a model chunk and what it wraps as ``module`` (DDP, Float16Module), outermost first."""
    module: Any = chunk
    while isinstance(module, nn.Module):
        yield module
        module = getattr(module, "module", None)


def unwrap_ddp(chunk: nn.Module) -> nn.Module | None:
    """Return Megatron's DistributedDataParallel among the wrappers of ``chunk``, or None."""
    ddp_class = import_megatron(DDP_MODULE).DistributedDataParallel
    return next((m for m in wrappers_of(chunk) if isinstance(m, ddp_class)), None)


def is_fully_sharded(chunk: nn.Module) -> bool:
    """Return whether any wrapper of ``chunk`` shards its parameters (any flavour of FSDP)."""
    kinds = (type(module) for module in wrappers_of(chunk))
    places = [f"{kind.__module__}.{kind.__name__}".lower().replace("_", "") for kind in kinds]
    return any("fsdp" in place or "fullysharded" in place for place in places)


def gathers_parameters(ddp: nn.Module) -> bool:
    """Return whether ``ddp`` gathers parameters in forward pre-hooks (overlap_param_gather)."""
    return bool(getattr(getattr(ddp, "ddp_config", None), "overlap_param_gather", False))


def _gather_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return DDP's forward pre-hooks, which it removes at times, for example to evaluate."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if getattr(hook, "__module__", None) == DDP_MODULE]


def call_parameter_gather_hooks(modules: Sequence[nn.Module]) -> None:
    """Run DDP's forward pre-hooks of ``modules``, which a replay does not run."""
    for module in modules:
        for hook in _gather_hooks(module):
            hook(module, ())


def gradient_marker(
    ddp: Any, parameters: Sequence[nn.Parameter]
) -> Callable[[], GradientMarker] | None:
    """Return a factory of one slot's signals to ``ddp`` that gradients are accumulated.

    The indices that the marker receives count ``parameters``. The result is None if DDP needs no
    such signal: without overlap_grad_reduce it reduces at the end of the step.
    """
    if not ddp.ddp_config.overlap_grad_reduce:
        return None
    groups = ddp.param_to_bucket_group
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
        # By bucket group: its parameters, the indices that the capture has not seen, and the event.
        self._members: dict[Any, list[nn.Parameter]] = defaultdict(list)
        self._missing: dict[Any, set[int]] = defaultdict(set)
        self._ready: dict[Any, torch.cuda.Event | None] = {}
        for index, target in enumerate(targets):
            if target is not None:
                group, parameter = target
                self._members[group].append(parameter)
                self._missing[group].add(index)

    def accumulated(self, index: int) -> None:
        target = self._targets[index]
        if target is None:
            return
        group, _ = target
        self._missing[group].discard(index)
        if self._missing[group]:
            return
        event: torch.cuda.Event | None = None
        if self._stream is not None:
            event = torch.cuda.Event(external=True)
            event.record()
        self._ready.pop(group, None)
        self._ready[group] = event

    def replayed(self) -> None:
        if not any(group.is_last_microbatch for group in self._ready):
            return
        for group, event in self._ready.items():
            with ExitStack() as stack:
                if event is not None:
                    assert self._stream is not None
                    self._stream.wait_event(event)
                    stack.enter_context(torch.cuda.stream(self._stream))
                for parameter in self._members[group]:
                    group.register_grad_ready(parameter, self._ddp.force_all_reduce)


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
        self._events: dict[Any, torch.cuda.Event] = {}  # by bucket group
        # Every module, with the bucket groups that no earlier module uses.
        self._hooked: list[tuple[nn.Module, list[Any]]] = []
        for submodule in module.modules():
            groups = _groups(submodule.parameters(recurse=False), group_of)
            new = [group for group in groups if group not in self._events]
            self._events.update((group, _recorded_event()) for group in new)
            self._hooked.append((submodule, new))
        layers = list(layers)
        in_layers = {id(m) for layer in layers for m in layer.modules()}
        gates = [(layer, _groups(layer.parameters(), group_of)) for layer in layers] + [
            (other, _groups(other.parameters(recurse=False), group_of))
            for other in module.modules()
            if id(other) not in in_layers
        ]
        self._gates = [(gate, groups) for gate, groups in gates if groups]

    def gather(self) -> None:
        """Before a replay, run DDP's hooks on the side stream: start gathers and wait for them.

        The side stream first waits for the work queued so far (the optimizer's writes).
        """
        first_module, _ = self._hooked[0]
        if not _gather_hooks(first_module) or all(
            group.param_gather_dispatched and group.param_gather_handle is None
            for group in self._events
        ):
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for module, groups in self._hooked:
                call_parameter_gather_hooks([module])
                for group in groups:
                    self._events[group].record()

    @contextmanager
    def wait_in_capture(self) -> Iterator[None]:
        """Make modules wait for their parameters in a capture, and its end for all others.

        An eager pass, as `verify` runs it after `gather`, waits for all of them at its beginning.
        """
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self._stream)
            yield
            return
        left = dict(self._events)

        def wait(groups: Sequence[Any], *_: Any) -> None:
            for group in groups:
                event = left.pop(group, None)
                if event is not None:
                    event.wait()

        handles = [
            gate.register_forward_pre_hook(partial(wait, groups)) for gate, groups in self._gates
        ]
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


def _groups(parameters: Iterable[nn.Parameter], group_of: dict[nn.Parameter, Any]) -> list[Any]:
    """Return the bucket groups of ``parameters``, each once, in order."""
    return list(dict.fromkeys(group_of[p] for p in parameters if p in group_of))


_FIELD = "delay_wgrad_compute"


def delay_in_new_configs() -> Callable[[], None]:
    """Delay weight gradients in every config that is created from now on; return the undo function.

    Transformer Engine's layers then leave them to ``backward_dw`` (the action W). Layers read the
    field from Megatron's TransformerConfig when they are built; DDP reads it from its own config.
    TransformerConfig refuses the field without expert-parallel overlap, so it is set after that
    check.

    Raises:
        ConfigError: The installed release has no such configs.
    """
    of_model = import_megatron("megatron.core.transformer").TransformerConfig
    of_ddp = import_megatron("megatron.core.distributed").DistributedDataParallelConfig
    undo = ExitStack()
    for kind in (of_model, of_ddp):
        undo.callback(patch_attributes(kind, {"__post_init__": _delaying(kind.__post_init__)}))
    return undo.close


def _delaying(check: Callable[[Any], None]) -> Callable[[Any], None]:
    def post_init(config: Any) -> None:
        setattr(config, _FIELD, False)  # a copy of a config has it already
        check(config)
        setattr(config, _FIELD, True)

    return post_init


def delays(module: nn.Module) -> bool:
    """Return whether a layer of Transformer Engine was built to delay its weight gradients."""
    store: Any = getattr(module, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def facts_of_delays(chunks: Iterable[nn.Module]) -> dict[str, object]:
    """Return the facts about delayed weight gradients of model chunks that rules check."""
    at_once = ddp_at_once = False
    for chunk in chunks:
        stores = [m for m in chunk.modules() if getattr(m, "wgrad_store", None) is not None]
        delaying = [m for m in stores if delays(m)]
        at_once |= len(delaying) < len(stores)
        ddp = unwrap_ddp(chunk)
        if delaying and ddp is not None:
            ddp_at_once |= not getattr(getattr(ddp, "ddp_config", None), _FIELD, False)
    return {"layers_at_once": at_once, "ddp_at_once": ddp_at_once}
