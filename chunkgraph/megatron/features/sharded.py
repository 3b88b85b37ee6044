"""Support models whose parameters Megatron-FSDP shards.

A replay runs no hooks of layers and parameters, and reads parameters where they were. So gathered
parameters keep their memory, and all of them are gathered before a run of a schedule. The hooks
around the captured part reduce the gradients after every backward, as without graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import private_names
from chunkgraph.megatron.core.data_parallel import wrappers_of
from chunkgraph.megatron.feature import Feature
from chunkgraph.megatron.model_part import Call, ModelPart
from chunkgraph.megatron.site import Site
from chunkgraph.settings.rule import Rule

_FLAG = "use_megatron_fsdp"
_MEGATRON_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OPTIONS = ("fsdp_double_buffer", "nccl_ub", "num_distributed_optimizer_instances")
_GUARDS = {"cpu", "to"}
"""Methods of parameters that guard against freed memory; stand-ins would inherit them."""
_WEIGHTS = ("model_weight_buffer", "transpose_weight_buffer")


def _remove_hooks(
    modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter], undo: ExitStack
) -> None:
    """Remove Megatron-FSDP's hooks until ``undo`` is closed."""
    for module in modules:
        for name in _HOOKS:
            _remove(getattr(module, name), undo)
    for parameter in parameters:
        _remove(parameter._post_accumulate_grad_hooks or {}, undo)


def _remove(hooks: dict[int, Any], undo: ExitStack) -> None:
    before = dict(hooks)
    own = [key for key, hook in hooks.items() if _module_of(hook).startswith(_MEGATRON_FSDP)]
    if not own:
        return
    for key in own:
        del hooks[key]

    def restore() -> None:
        added = {key: hook for key, hook in hooks.items() if key not in before}
        hooks.clear()
        hooks.update({**before, **added})

    undo.callback(restore)


def _module_of(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__module__", ""))


class _Shards:
    """The parameters of one chunk in Megatron-FSDP.

    It gathers parameters into temporary buckets in hooks of layers, and reduces gradients in hooks
    of parameters. Gradients that no hook has taken are reduced by its own hook at the end of a
    backward, which surrounds the captured part.

    Args:
        wrapper: The MegatronFSDP around the chunk.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.parameters = list(wrapper.raw_param.values())

    @classmethod
    def of(cls, chunk: nn.Module) -> Self | None:
        """Return the shards of a chunk; None without Megatron-FSDP."""
        wanted = f"{_MEGATRON_FSDP}.megatron_fsdp", "MegatronFSDP"
        for module in wrappers_of(chunk):
            if (type(module).__module__, type(module).__name__) == wanted:
                return cls(module)
        return None

    def facts(self) -> dict[str, object]:
        """Return the facts that rules check."""
        options = {name: getattr(self._wrapper.ddp_config, name, None) for name in _OPTIONS}
        return {_FLAG: True, "is_fully_sharded": False, **options}

    def keep_in_place(self, undo: ExitStack) -> None:
        """Let the buckets of parameters keep their memory.

        Raises:
            ConfigError: This release of Megatron-FSDP has other buckets.
        """
        pipeline = self._wrapper.all_gather_pipeline
        if "preserve_non_fsdp_units" not in inspect.signature(pipeline.reset).parameters:
            raise ConfigError(
                "Megatron-FSDP of this megatron-core releases its buckets in another way than that "
                "of 0.19. Use megatron-core 0.19, or train without FSDP."
            )
        pipeline.reset(preserve_non_fsdp_units=False)
        (temporary,) = private_names(
            f"{_MEGATRON_FSDP}.param_and_grad_buffer", "TemporaryBucketAllocator"
        )
        for name in _WEIGHTS:
            lasting = temporary()
            lasting.free = lambda _bucket_id: None
            for group in self._wrapper.param_and_grad_buffer.parameter_groups:
                buffer = getattr(group, name)
                if buffer is not None:
                    previous = buffer.temporary_bucket_allocator
                    undo.callback(setattr, buffer, "temporary_bucket_allocator", previous)
                    buffer.temporary_bucket_allocator = lasting
        undo.callback(pipeline.reset, preserve_non_fsdp_units=False)
        for parameter in self.parameters:
            for name in _GUARDS & vars(parameter).keys():
                undo.callback(setattr, parameter, name, vars(parameter).pop(name))

    def gather(self) -> None:
        """Gather all buckets; those that a step has not changed are in place."""
        self.show_gathered()
        self._wrapper.all_gather_and_wait_parameters_ready(self.parameters, prefetch=False)
        for parameter in self.parameters:
            # None between backwards; graphs accumulate in `grad`, which is reduced after each.
            vars(parameter).pop("main_grad", None)

    def show_gathered(self) -> None:
        """Undo the end of a step's reduction, which shows shards."""
        self._wrapper._replace_param_with_raw_if_needed()


_POOL = "its pool of two buffers moves parameters"
_UNTESTED = "untested in chunk graphs; leave one of them out"


class Sharding(Feature):
    """Gather sharded parameters before each run, and leave the reduction to their wrapper.

    Args:
        shards: The shards of each chunk.
    """

    replays_forwards = False
    rules = (
        Rule(f"use_torch_fsdp2: chunk graphs do not support it; use {{{_FLAG}=true}}"),
        Rule(
            f"{_FLAG}: fused kernels would add gradients to buffers that move; use "
            "--no-gradient-accumulation-fusion",
            lambda f: f.use_megatron_fsdp and f.gradient_accumulation_fusion,
        ),
        Rule(f"{_FLAG} fp8=: {_UNTESTED}"),
        Rule(f"{_FLAG} stash: {_UNTESTED}"),
        Rule(
            f"{_FLAG} pipeline_model_parallel_size: {_UNTESTED}",
            lambda f: f.use_megatron_fsdp and (f.pipeline_model_parallel_size or 1) > 1,
        ),
        Rule(
            f"{_FLAG} token_drops: {_UNTESTED}",
            lambda f: f.use_megatron_fsdp and f.token_drops == "rerun",
        ),
        Rule(f"{_FLAG} fsdp_double_buffer: {_POOL}; leave it out"),
        Rule(f"{_FLAG} nccl_ub: {_POOL}; leave it out"),
        Rule(
            f"{_FLAG} num_distributed_optimizer_instances: {_UNTESTED}",
            lambda f: f.use_megatron_fsdp and (f.num_distributed_optimizer_instances or 1) > 1,
        ),
    )

    def __init__(self, shards: Sequence[_Shards]) -> None:
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
        site.meet()
        for shards in _shards_of(site):
            shards.gather()

    @classmethod
    def of(cls, site: Site, undo: ExitStack) -> Self | None:
        """Apply if a wrapper shards the model.

        Hooks that a replay does not run are removed; those around captured parts remain.
        """
        if not (shards := _shards_of(site)):
            return None
        for of_chunk, part in zip(shards, site.parts, strict=True):
            _remove_hooks(part.inner_modules.values(), of_chunk.parameters, undo)
        return cls(shards)

    def call(self, part: ModelPart, call: Call) -> Call:
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


def _shards_of(site: Site) -> list[_Shards]:
    return [s for chunk in site.chunks if (s := _Shards.of(chunk)) is not None]
