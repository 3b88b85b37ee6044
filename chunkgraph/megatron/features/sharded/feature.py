"""Support models whose parameters Megatron-FSDP or torch's FSDP2 shards.

A replay runs no hooks of layers and parameters, and reads parameters where they were. So gathered
parameters keep their memory, and all of them are gathered before a run of a schedule. The hooks
around the captured part reduce the gradients after every backward, as without graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from chunkgraph.megatron.captured_part import Call, CapturedPart
from chunkgraph.megatron.feature import Feature
from chunkgraph.megatron.features.sharded.megatron_fsdp import MegatronShards
from chunkgraph.megatron.features.sharded.shards import remove_hooks
from chunkgraph.megatron.features.sharded.torch_fsdp import TorchShards
from chunkgraph.megatron.site import Site
from chunkgraph.settings.rule import Rule

__all__ = ["Sharding"]

_POOL = "its pool of two buffers moves parameters"
_UNTESTED = "untested in chunk graphs; leave one of them out"
_KINDS = (MegatronShards, TorchShards)
_AnyShards = MegatronShards | TorchShards


def _rules(flag: str) -> tuple[Rule, ...]:
    """Return the rules of both kinds of sharding."""

    def is_sharded(f: Any) -> bool:
        return bool(getattr(f, flag))

    return (
        Rule(
            f"{flag}: fused kernels would add gradients to buffers that move; use "
            "--no-gradient-accumulation-fusion",
            lambda f: is_sharded(f) and f.gradient_accumulation_fusion,
        ),
        Rule(f"{flag} fp8=: {_UNTESTED}"),
        Rule(f"{flag} fp8_param_gather: {_UNTESTED}"),
        Rule(f"{flag} stash: {_UNTESTED}"),
        Rule(
            f"{flag} pipeline_model_parallel_size: {_UNTESTED}",
            lambda f: is_sharded(f) and (f.pipeline_model_parallel_size or 1) > 1,
        ),
        Rule(
            f"{flag} token_drops: {_UNTESTED}",
            lambda f: is_sharded(f) and f.token_drops == "rerun",
        ),
    )


class Sharding(Feature):
    """Gather sharded parameters before each run, and leave the reduction to their wrapper.

    Args:
        shards: The shards of each chunk.
    """

    rules = (
        *(rule for kind in _KINDS for rule in _rules(kind.flag)),
        Rule(f"use_megatron_fsdp fsdp_double_buffer: {_POOL}; leave it out"),
        Rule(f"use_megatron_fsdp nccl_ub: {_POOL}; leave it out"),
        Rule(
            f"use_megatron_fsdp num_distributed_optimizer_instances: {_UNTESTED}",
            lambda f: f.use_megatron_fsdp and (f.num_distributed_optimizer_instances or 1) > 1,
        ),
    )

    def __init__(self, shards: Sequence[_AnyShards]) -> None:
        self._shards = shards

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return the facts of the wrapper; they replace the one that FSDP is unsupported."""
        return {name: fact for shards in _shards_of(site) for name, fact in shards.facts().items()}

    @classmethod
    def prepare(cls, site: Site, undo: ExitStack) -> None:
        """Gather parameters into lasting memory, before captured parts refer to them."""
        for shards in _shards_of(site):
            shards.keep_in_place(undo)

    @classmethod
    def of(cls, site: Site, undo: ExitStack) -> Self | None:
        """Apply if a wrapper shards the model.

        Hooks that a replay does not run are removed; those around captured parts remain.
        """
        if not (shards := _shards_of(site)):
            return None
        for of_chunk, part in zip(shards, site.parts, strict=True):
            remove_hooks(of_chunk.package, part.inner_modules.values(), of_chunk.parameters, undo)
        return cls(shards)

    def call(self, part: CapturedPart, call: Call) -> Call:
        """Point the modules at gathered parameters before each forward."""
        shards = self._shards[part.index]

        def gathered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            shards.show_gathered()
            return call(args, kwargs)

        return gathered

    def begin_run(self) -> None:
        """Gather the parameters that the last step has changed."""
        for shards in self._shards:
            shards.gather()


def _shards_of(site: Site) -> list[_AnyShards]:
    return [s for chunk in site.chunks for kind in _KINDS if (s := kind.of(chunk)) is not None]
