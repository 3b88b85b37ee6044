"""Attach graphs to the models of a framework, which builds them and calls the schedule itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from chunkgraph.engine import CaptureOptions
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach
from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.megatron.site import config_of
from chunkgraph.packing import PackedShape

Keywords = dict[str, Any]
"""Keywords of a forward-backward function."""
Packing = PackedShape | PackingOptions


class AttachedModels:
    """Run the schedule of each of a framework's models with graphs of its own.

    A model gets its graphs when it first runs: then it has memory on the device, and all ranks run
    it. They stay until the process ends. Without paged slots, all models share the memory of the
    first.

    Args:
        framework: Module that looks up ``get_forward_backward_func`` at each call; from now on it
            finds `run`.
        offload: A class or object, and the name of its method before which graphs sleep from now
            on.
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
        offload: tuple[Any, str],
        with_packings: Callable[[Keywords], Keywords],
        packing: Packing,
        options: CaptureOptions | None,
    ) -> None:
        if options is None:
            options = CaptureOptions(on_moved_memory="recapture", can_sleep=True)
        self._attach = functools.partial(attach, packing=packing, options=options)
        self._with_packings, self._has_pages = with_packings, options.has_pages
        self._get_schedule = framework.get_forward_backward_func
        self._schedules: dict[nn.Module, Callable[..., Any]] = {}
        self.graphs: dict[nn.Module, MegatronChunkGraphs] = {}
        framework.get_forward_backward_func = lambda: self.run
        method = getattr(*offload)

        @functools.wraps(method)
        def asleep(*args: Any, **kwargs: Any) -> Any:
            self.sleep()
            return method(*args, **kwargs)

        setattr(*offload, asleep)

    def run(self, **keywords: Any) -> Any:
        """Run one step with graphs, which wake if they sleep; see Megatron's schedules."""
        keywords = self._with_packings(keywords)
        model = keywords["model"]
        chunks = [model] if isinstance(model, nn.Module) else [*model]
        first = chunks[0]
        if first not in self.graphs:
            for chunk in chunks:  # stages exchange the shapes of steps that do not fit
                config_of(chunk).variable_seq_lengths = True
            other = None if self._has_pages else next(iter(self.graphs.values()), None)
            self.graphs[first] = graphs = self._attach(chunks, shares_memory_with=other)
            self._schedules[first] = graphs.wrap_forward_backward(self._get_schedule())
        self.graphs[first].wake()
        return self._schedules[first](**keywords)

    def sleep(self) -> None:
        """Give the memory of all graphs back until the next step."""
        for graphs in self.graphs.values():
            if graphs.engine.backend.can_sleep:
                graphs.sleep()


def refuse(framework: str, settings: dict[str, bool]) -> None:
    """Refuse the settings of a framework that are present.

    Raises:
        ConfigError: One is.
    """
    if present := [name for name, is_present in settings.items() if is_present]:
        raise ConfigError(
            f"Chunk graphs in {framework} cannot run with {', '.join(present)}. Change these "
            "settings, or leave install() out."
        )


def drawn(keywords: Keywords) -> tuple[list[Any], Keywords]:
    """Return the microbatches of a step, and keywords whose iterators yield them."""
    data, count = keywords["data_iterator"], keywords["num_microbatches"]
    is_list = isinstance(data, list)
    of_chunks = [[next(one) for _ in range(count)] for one in (data if is_list else [data])]
    again: Any = [iter(batches) for batches in of_chunks]
    return of_chunks[0], {**keywords, "data_iterator": again if is_list else again[0]}
