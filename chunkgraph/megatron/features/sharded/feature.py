"""Support models in Megatron-FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

from chunkgraph.megatron.core.data_parallel import megatron_fsdp
from chunkgraph.megatron.feature import Feature
from chunkgraph.megatron.features.sharded.shards import Shards
from chunkgraph.megatron.site import Site
from chunkgraph.megatron.step import Step
from chunkgraph.settings.rule import Rule

__all__ = ["Sharding"]

_POOL = "its pool of two buffers moves parameters"
_UNTESTED = "untested in chunk graphs; leave one of them out"
_OF_DDP = ("fsdp_double_buffer", "nccl_ub")


class Sharding(Feature):
    """Gather sharded parameters before each run, and leave the reduction to Megatron-FSDP.

    Args:
        shards: The shards of each chunk.
        inner: The modules of each chunk that hooks are removed from.
    """

    rules = (
        Rule(
            "use_megatron_fsdp gradient_accumulation_fusion: kernels would add gradients to "
            "buffers that move; use --no-gradient-accumulation-fusion"
        ),
        Rule(f"use_megatron_fsdp fsdp_double_buffer: {_POOL}; leave it out"),
        Rule(f"use_megatron_fsdp nccl_ub: {_POOL}; leave it out"),
        Rule(f"use_megatron_fsdp fp8=: {_UNTESTED}"),
        Rule(f"use_megatron_fsdp fp8_param_gather: {_UNTESTED}"),
        Rule(
            f"use_megatron_fsdp num_distributed_optimizer_instances: {_UNTESTED}",
            lambda f: f.use_megatron_fsdp and (f.num_distributed_optimizer_instances or 1) > 1,
        ),
        Rule(
            f"use_megatron_fsdp pipeline_model_parallel_size: {_UNTESTED}",
            lambda f: f.use_megatron_fsdp and (f.pipeline_model_parallel_size or 1) > 1,
        ),
        Rule(f"use_megatron_fsdp stash: {_UNTESTED}"),
        Rule(
            f"use_megatron_fsdp token_drops: {_UNTESTED}",
            lambda f: f.use_megatron_fsdp and f.token_drops == "rerun",
        ),
    )

    def __init__(self, shards: Sequence[Shards], site: Site) -> None:
        self._shards = shards
        self._parts = site.parts

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return the facts of Megatron-FSDP's wrapper."""
        wrappers = [w for chunk in site.chunks if (w := megatron_fsdp(chunk)) is not None]
        if not wrappers:
            return {}
        config = wrappers[0].ddp_config
        return {
            "use_megatron_fsdp": True,
            **{name: getattr(config, name, False) for name in _OF_DDP},
            "num_distributed_optimizer_instances": config.num_distributed_optimizer_instances,
        }

    @classmethod
    def prepare(cls, site: Site, undo: ExitStack) -> None:
        """Gather parameters into lasting memory, before captured parts refer to them."""
        for shards in _shards_of(site):
            shards.keep_in_place(undo)

    @classmethod
    def of(cls, site: Site) -> Self | None:
        """Apply if Megatron-FSDP wraps the model."""
        shards = _shards_of(site)
        return cls(shards, site) if shards else None

    def install(self, undo: ExitStack) -> None:
        """Remove the hooks that a replay cannot run; those around captured parts do their work."""
        for shards, part in zip(self._shards, self._parts, strict=True):
            shards.remove_hooks(part.inner_modules.values(), undo)

    def begin_run(self) -> None:
        """Gather the parameters that the last step has changed."""
        for shards in self._shards:
            shards.gather()

    @contextmanager
    def step(self, _: Step) -> Iterator[None]:
        """Point the modules at gathered parameters again, which the engine checks after a step."""
        yield
        for shards in self._shards:
            shards.show_gathered()

    def end_step(self, _: Step) -> None:
        """Point the modules at shards again, if Megatron-FSDP did."""
        for shards in self._shards:
            shards.show_shards()


def _shards_of(site: Site) -> list[Shards]:
    wrappers = map(megatron_fsdp, site.chunks)
    return [Shards(wrapper) for wrapper in wrappers if wrapper is not None]
