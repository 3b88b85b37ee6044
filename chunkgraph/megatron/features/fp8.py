"""Keep the state of Transformer Engine's FP8, on the device and in Python, right in graphs.

Weights. A layer quantizes its weight in the first microbatch of a step and keeps the result, its
*cache*, for the other microbatches. The layer's attribute ``is_first_microbatch`` marks the first
microbatch, and a graph would freeze it. In a capture the layer reads a process-wide tensor
instead, so that one graph either updates the cache or keeps it. `Fp8State` provides this tensor to
the graphs and writes it before a replayed forward when it must change. All slots share the caches,
which eager steps allocated outside of all pools.

Delayed scaling. Quantizers record the largest magnitudes. At the end of a chunk's forward, and of
its backward, these are reduced over a group of ranks and give the scales of the next microbatch.
This is device work on tensors with fixed addresses, so it is captured: with the forward as it is;
in the backward, where layers omit it during a capture, by `Fp8State` at the end. Several
microbatches in flight then update the scales in the order of the replays, which is the order of
the eager run. A slot holds what its backward needs of its forward's scales.

Current and blockwise scaling keep no state between microbatches. For weights that are FP8
themselves see `PrimaryWeights`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from chunkgraph.engine.chunk import Chunk
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.megatron.core.model_kinds import fp8_recipe
from chunkgraph.megatron.feature import Feature, Step, Work, chained
from chunkgraph.megatron.model_part import ModelPart
from chunkgraph.megatron.rules.experts import uses_dropless
from chunkgraph.megatron.rules.features import FP8_RULES
from chunkgraph.megatron.site import Site
from chunkgraph.settings.rule import Rule

_MODULE = "transformer_engine.pytorch.fp8"
_FIRST = "is_first_microbatch"


def fp8_is_installed() -> bool:
    """Return whether Transformer Engine can be imported."""
    try:
        importlib.import_module(_MODULE)
    except ImportError:
        return False
    return True


def reset_fp8() -> None:
    """Reset the process-wide FP8 state; models and graphs that used it must no longer exist."""
    if fp8_is_installed():
        _manager().reset()


def _weight_rules(name: str) -> tuple[Rule, ...]:
    """Return the rules of FP8 weights; Megatron's configs have two names for the setting."""
    return (
        Rule(
            f"{name}: the installed Transformer Engine renews the transposes of FP8 weights in the "
            "backward, which a replay does not do; install a release with "
            "post_all_gather_processing",
            lambda f: (
                getattr(f, name)
                and f.fp8_recipe
                and f.has_transformer_engine
                and not f.keeps_transposes
            ),
        ),
        Rule(
            f"{name} num_moe_experts: FP8 weights of experts are untested in chunk graphs; leave "
            "one of them out",
            lambda f: getattr(f, name) and f.num_moe_experts,
        ),
    )


_RULES = (
    *FP8_RULES,
    *_weight_rules("fp8_param"),
    *_weight_rules("fp8_param_gather"),
    Rule(
        "fp8: it needs Transformer Engine, which cannot be imported; install chunkgraph[te]",
        lambda f: f.fp8_recipe and not f.has_transformer_engine,
    ),
    Rule(
        "fp8_recipe: its quantizers are untested in chunk graphs; use {fp8_recipe=tensorwise}, "
        "{fp8_recipe=blockwise} or {fp8_recipe=delayed}",
        lambda f: f.fp8_recipe not in (None, "delayed", "tensorwise", "blockwise"),
    ),
    Rule(
        "use_transformer_engine_op_fuser fp8: fused operations keep the state of their quantizers "
        "in other places than layers, which chunk graphs do not handle; leave one of them out",
        lambda f: f.fp8_recipe and f.use_transformer_engine_op_fuser,
    ),
    Rule(
        "schedule fp8 moe_expert_capacity_factor: weight halves of quantized experts without a "
        "capacity are untested; leave one of them out",
        lambda f: f.splits_backward and f.fp8_recipe and uses_dropless(f),
    ),
    Rule(
        "verify schedule fp8_recipe: the eager backward to compare with runs after the first half, "
        "which has moved the scales of delayed scaling on; use {verify=poison}, or "
        "{fp8_recipe=tensorwise}",
        lambda f: f.verify == "shadow" and f.splits_backward and f.fp8_recipe == "delayed",
    ),
)


class Fp8State(Feature):
    """Support the FP8 state of one rank's captured modules.

    Args:
        parts: For each chunk, its modules.
        labels: Names of the chunks in errors.
        device: Device of the parameters.
        is_delayed: Whether scales depend on earlier microbatches (delayed scaling).
    """

    replays_forwards = False
    rules = _RULES

    def __init__(
        self,
        parts: Sequence[Sequence[nn.Module]],
        labels: Sequence[str],
        device: torch.device,
        *,
        is_delayed: bool,
    ) -> None:
        self._manager = _manager()
        self._parts = tuple(tuple(modules) for modules in parts)
        self._labels = tuple(labels)
        self._device = device
        self._is_delayed = is_delayed
        self._layers = tuple(
            tuple(m for m in modules if hasattr(m, _FIRST)) for modules in self._parts
        )
        # Written before replays, read by every graph.
        self._skip = torch.ones(1, dtype=torch.float32, device=device)
        self._skips = True
        self._is_first = False
        self._is_capturing = False
        self._references: list[torch.Tensor] = []
        self._weights = PrimaryWeights(self._parts, self._labels)

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return what a model in FP8 finds in the installed Transformer Engine."""
        is_fp8 = bool(fp8_recipe(site.config))
        return {
            "has_transformer_engine": not is_fp8 or fp8_is_installed(),
            "keeps_transposes": is_fp8 and keeps_transposes(),
        }

    @classmethod
    def of(cls, site: Site, _undo: ExitStack) -> Self | None:
        """Apply to models in FP8."""
        recipe = fp8_recipe(site.config)
        if recipe is None:
            return None
        return cls(
            [part.modules for part in site.parts],
            [part.label for part in site.parts],
            site.device,
            is_delayed=recipe == "delayed",
        )

    def wrap(self, part: ModelPart, chunk: Chunk) -> Chunk:
        """Update the chunk's FP8 state around replays, and check it in captures."""
        run, index = chunk.forward, part.index

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._is_capturing:
                return run(*args, **kwargs)
            caches = self._caches(index)
            result = run(*args, **kwargs)
            if self._is_in_graph():
                self._check_caches(index, caches)
                self._weights.check_captured(index)
            return result

        update_scales = partial(self._manager.reduce_and_update_fp8_tensors, forward=False)
        return replace(
            chunk,
            forward=forward,
            before_forward=chained(chunk.before_forward, partial(self._begin_forward, index)),
            end_of_backward=update_scales if self._is_delayed else None,
        )

    def around(self, work: Work) -> AbstractContextManager[None]:
        """Restore histories and scales; capture with this object's tensor."""
        contexts = {
            "session": self._preserving,
            "capture": self._capturing,
            "verify": self._verifying,
        }
        return contexts[work]()

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Make captured layers read this object's tensor; keep the caches alive afterwards.

        Raises:
            CaptureError: A layer allocated a new cache, which would lie in the memory of one slot.
        """
        self._weights.prepare()
        fields, self._is_capturing = self._fields(), True
        previous = fields.skip_fp8_weight_update_tensor
        self._skip.fill_(1.0)
        self._skips = True
        # With such a tensor, layers that are configured to cache nothing would cache.
        caches_nothing = any(
            getattr(layer, "disable_parameter_transpose_cache", False)
            for layers in self._layers
            for layer in layers
        )
        fields.skip_fp8_weight_update_tensor = None if caches_nothing else self._skip
        try:
            yield
        finally:
            fields.skip_fp8_weight_update_tensor, self._is_capturing = previous, False
        self._weights.hold()
        self._references = [
            tensor
            for index in range(len(self._parts))
            for tensors in self._caches(index).values()
            for tensor in tensors
        ]
        self._references += [*self._histories(), *self._scales()]

    @contextmanager
    def _preserving(self) -> Iterator[None]:
        """Restore histories, scales and the layers' ``is_first_microbatch`` on exit."""
        saved = [(t, t.detach().clone()) for t in (*self._histories(), *self._scales())]
        saved_ids = {id(tensor) for tensor, _ in saved}
        flags = [(m, getattr(m, _FIRST)) for layers in self._layers for m in layers]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in saved:
                    tensor.copy_(value)
                # Reset tensors that a first forward created inside to their initial values.
                for history in self._histories():
                    if id(history) not in saved_ids:
                        history.zero_()
                for scale in self._scales():
                    if id(scale) not in saved_ids:
                        scale.fill_(1.0)
            for module, is_first in flags:
                setattr(module, _FIRST, is_first)

    @contextmanager
    def _verifying(self) -> Iterator[None]:
        """Give an eager pass the replay's ``is_first_microbatch``; inside `_preserving`."""
        for layers in self._layers:
            _set_first(layers, self._is_first)
        yield

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Check before replays that graphs read the weights where they are."""
        if step.is_replayed:
            self._weights.prepare()
            self._weights.check()
        yield

    def release(self) -> None:
        """Drop the references to the caches; no graph may use them afterwards."""
        self._references.clear()
        self._weights.release()

    def _begin_forward(self, index: int) -> None:
        """Write the tensor that the next replay reads, if it must change.

        Megatron's schedule sets ``is_first_microbatch`` of every layer when the first microbatch
        of a step begins. An eager layer resets it in its forward; for replayed layers this method
        resets it.
        """
        layers = self._layers[index]
        self._is_first = bool(layers) and getattr(layers[0], _FIRST)
        if self._is_first:
            _set_first(layers, False)
        if self._is_first == self._skips:
            self._skips = not self._is_first
            self._skip.fill_(float(self._skips))

    def _is_in_graph(self) -> bool:
        # The recorder runs no warmup pass, in which layers could allocate caches.
        return self._device.type != "cuda" or torch.cuda.is_current_stream_capturing()

    def _check_caches(self, index: int, before: dict[str, tuple[torch.Tensor, ...]]) -> None:
        after = self._caches(index)
        for name, tensors in after.items():
            if _addresses(tensors) != _addresses(before.get(name, ())):
                raise CaptureError(
                    f"{self._labels[index]}: {name} allocated its cached FP8 weight during a "
                    "capture, in memory that belongs to one slot.\n  To do: run an eager training "
                    "step before the capture (num_warmup_steps of 1 or more), with gradients for "
                    "the same inputs; or train without FP8."
                )

    def _caches(self, index: int) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return the memory of every cached weight of a chunk, by layer and weight name."""
        return {
            f"layer {number} ({type(module).__name__}), {name}": memory_of(weight)
            for number, module in enumerate(self._parts[index])
            for name, weight in getattr(module, "_fp8_workspaces", {}).items()
        }

    def _fields(self) -> Any:
        """Return the holder of the process-wide state: an object, or the class in earlier 2.x."""
        return getattr(self._manager, "quantization_state", self._manager)

    def _histories(self) -> list[torch.Tensor]:
        return _flattened(self._fields().global_amax_history_buffer)

    def _scales(self) -> list[torch.Tensor]:
        return _flattened(self._fields().global_scale_buffer)


def _set_first(layers: Sequence[nn.Module], is_first: bool) -> None:
    for layer in layers:
        setattr(layer, _FIRST, is_first)


def _manager() -> Any:
    return importlib.import_module(_MODULE).FP8GlobalStateManager


def _flattened(buffers: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for tensors in buffers.values() for tensor in tensors]


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def keeps_transposes() -> bool:
    """Return whether Transformer Engine renews the transposes of weights in place.

    Earlier releases mark them as outdated after each optimizer step, and the next backward renews
    them, which a replay would not do.
    """
    try:
        utils = importlib.import_module("transformer_engine.pytorch.tensor.utils")
    except ImportError:
        return False
    return hasattr(utils, "post_all_gather_processing")


def memory_of(weight: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors inside a quantized tensor, or a plain tensor itself."""
    # Others, such as main_grad, belong to Megatron.
    inner = tuple(
        value
        for name, value in vars(weight).items()
        if name.startswith("_") and isinstance(value, torch.Tensor)
    )
    return inner if inner or not isinstance(weight, torch.Tensor) else (weight,)


class PrimaryWeights:
    """The FP8 weights of captured modules, which the optimizer writes (``fp8_param_gather``).

    The optimizer casts its weights into the FP8 data in place, and after the all-gather Megatron
    lets Transformer Engine renew their transposes in place. Both happen outside of graphs. A graph
    stays right as long as a weight keeps its data, transpose and scales where they are, and none of
    them is created in a capture, where Python state would skip it in the next one.

    Args:
        parts: For each chunk, its modules.
        labels: Names of the chunks in errors.
    """

    def __init__(self, parts: Sequence[Sequence[nn.Module]], labels: Sequence[str]) -> None:
        # Modules with the names of their quantized weights, and the weights.
        self._places = [
            [
                (module, name, weight)
                for module in modules
                for name, weight in module._parameters.items()
                if hasattr(weight, "update_usage")
            ]
            for modules in parts
        ]
        self._labels = tuple(labels)
        self._captured: list[tuple[torch.Tensor, ...]] = []

    def prepare(self) -> None:
        """Create transposes that do not exist yet, and renew outdated ones."""
        for _, weight in self._named():
            weight.update_usage(rowwise_usage=True, columnwise_usage=True)

    def check_captured(self, index: int) -> None:
        """Check that captures of a chunk read the memory of the weights.

        In a session other tensors on the same memory replace the weights in their modules.

        Raises:
            CaptureError: The session began before a weight had its transpose.
        """
        for module, name, weight in self._places[index]:
            if _addresses(memory_of(module._parameters[name])) != _addresses(memory_of(weight)):
                raise CaptureError(
                    f"{self._labels[index]}: {name} of {type(module).__name__} is an FP8 weight "
                    "whose transpose was created after the capture had begun.\n  To do: run an "
                    "eager training step before the capture (num_warmup_steps of 1 or more); or "
                    "train without FP8 weights."
                )

    def hold(self) -> None:
        """Keep the memory that captures read, and remember where it is."""
        self._captured = [memory_of(weight) for _, weight in self._named()]

    def check(self) -> None:
        """Check that graphs still read the weights.

        Raises:
            ReplayMismatchError: A weight has moved to other memory.
        """
        for (name, weight), captured in zip(self._named(), self._captured, strict=True):
            if _addresses(memory_of(weight)) != _addresses(captured):
                raise ReplayMismatchError(
                    f"{name}: its FP8 data, transpose or scales have moved to other memory since "
                    "the capture. Update weights in place (copy_), or release the graphs and "
                    "capture again after replacing them."
                )

    def release(self) -> None:
        """Drop the memory; no graph may use it afterwards."""
        self._captured = []

    def _named(self) -> Iterator[tuple[str, Any]]:
        for label, places in zip(self._labels, self._places, strict=True):
            for module, name, weight in places:
                yield f"{label}: {name} of {type(module).__name__}", weight
