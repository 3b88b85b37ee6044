"""Attach graphs to the models of a framework, which builds them and calls the schedule itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from chunkgraph.engine import CaptureOptions
from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach
from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.megatron.site import config_of
from chunkgraph.packing import PackedShape

Keywords = dict[str, Any]
"""Keywords of a forward-backward function."""


class AttachedModels:
    """Run the schedule of each of a framework's models with graphs of its own.

    A model gets its graphs when it first runs: then it has memory on the device, and all ranks run
    it. They stay until the process ends.

    Args:
        framework: Module that looks up ``get_forward_backward_func`` at each call; from now on it
            finds `run`.
        with_packings: Adds ``packings`` to the keywords of a step, see
            `MegatronChunkGraphs.wrap_forward_backward`; it may replace others.
        packing: See `attach`.
        options: See `attach`; by default graphs can sleep, and are captured again if offloading
            moves parameters.

    Attributes:
        graphs: The graphs of each model, by its first chunk.
    """

    def __init__(
        self,
        framework: Any,
        with_packings: Callable[[Keywords], Keywords],
        packing: PackedShape | PackingOptions,
        options: CaptureOptions | None,
    ) -> None:
        if options is None:
            options = CaptureOptions(on_moved_memory="recapture", can_sleep=True)
        self._options, self._packing, self._with_packings = options, packing, with_packings
        self._schedules: dict[nn.Module, Callable[..., Any]] = {}
        self._get_schedule = framework.get_forward_backward_func
        self.graphs: dict[nn.Module, MegatronChunkGraphs] = {}
        framework.get_forward_backward_func = lambda: self.run

    def run(self, **keywords: Any) -> Any:
        """Run one step with graphs, which wake if they sleep; see Megatron's schedules."""
        chunks = _chunks(keywords["model"])
        if chunks[0] not in self.graphs:
            for chunk in chunks:  # else stages fail in steps that do not fit
                config_of(chunk).variable_seq_lengths = True
            graphs = attach(chunks, packing=self._packing, options=self._options)
            self.graphs[chunks[0]] = graphs
            self._schedules[chunks[0]] = graphs.wrap_forward_backward(self._get_schedule())
        self.graphs[chunks[0]].wake()
        return self._schedules[chunks[0]](**self._with_packings(keywords))

    def sleep(self, model: nn.Module | Sequence[nn.Module] | None = None) -> None:
        """Give the memory of graphs back until the next step.

        Args:
            model: The model whose graphs sleep; None for all.
        """
        first = None if model is None else _chunks(model)[0]
        for chunk, graphs in self.graphs.items():
            if first in (None, chunk) and graphs.engine.backend.can_sleep:
                graphs.sleep()


def call_before(kind: type, name: str, action: Callable[..., None]) -> None:
    """Replace a method of a class by one that calls ``action`` first, with the same arguments."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def with_action(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(kind, name, with_action)


def drawn(keywords: Keywords) -> tuple[list[Any], Keywords]:
    """Return the microbatches of a step, and keywords whose iterators yield them."""
    data, count = keywords["data_iterator"], keywords["num_microbatches"]
    is_list = isinstance(data, list)
    of_chunks = [[next(one) for _ in range(count)] for one in (data if is_list else [data])]
    again: Any = [iter(batches) for batches in of_chunks]
    return of_chunks[0], {**keywords, "data_iterator": again if is_list else again[0]}


def _chunks(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else [*model]
