"""Support models whose parameters Megatron-FSDP or torch's FSDP2 shards.

A replay runs no hooks of layers and parameters, and reads parameters where they were. So gathered
parameters keep their memory, and all of them are gathered before a run of a schedule. The hooks
around the captured part reduce the gradients after every backward, as without graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.captured_part import Call, CapturedPart
from chunkgraph.megatron.core.access import private_names
from chunkgraph.megatron.core.data_parallel import wrappers_of
from chunkgraph.megatron.feature import Feature
from chunkgraph.megatron.site import Site
from chunkgraph.settings.rule import Rule

__all__ = ["Sharding"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Shards:
    """The sharded parameters of one model chunk.

    Attributes:
        flag: Megatron's flag of the wrapper, without dashes.
        package: Name of the package whose hooks of modules and parameters shard them.
    """

    flag: str
    package: str

    def facts(self) -> dict[str, object]:
        """Return the facts that rules check."""
        return {self.flag: True, "is_fully_sharded": False}


def wrapper_of(chunk: nn.Module, module_name: str, class_name: str) -> Any:
    """Return the wrapper of this class among those of ``chunk``, or None."""
    kinds = ((type(module), module) for module in wrappers_of(chunk))
    wanted = module_name, class_name
    return next((m for kind, m in kinds if (kind.__module__, kind.__name__) == wanted), None)


def remove_hooks(
    package: str,
    modules: Iterable[nn.Module],
    parameters: Sequence[nn.Parameter],
    undo: ExitStack,
) -> None:
    """Remove the hooks of a package until ``undo`` is closed."""
    for module in modules:
        for name in _HOOKS:
            _remove(package, getattr(module, name), undo)
    for parameter in parameters:
        _remove(package, parameter._post_accumulate_grad_hooks or {}, undo)


def _remove(package: str, hooks: dict[int, Any], undo: ExitStack) -> None:
    before = dict(hooks)
    own = [key for key, hook in hooks.items() if _module_of(hook).startswith(package)]
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


_MEGATRON_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_OPTIONS = ("fsdp_double_buffer", "nccl_ub", "num_distributed_optimizer_instances")
_GUARDS = {"cpu", "to"}
"""Methods of parameters that guard against freed memory; stand-ins would inherit them."""
_WEIGHTS = ("model_weight_buffer", "transpose_weight_buffer")


class MegatronShards(Shards):
    """The parameters of one chunk in Megatron-FSDP.

    It gathers parameters into temporary buckets in hooks of layers, and reduces gradients in hooks
    of parameters. Gradients that no hook has taken are reduced by its own hook at the end of a
    backward, which surrounds the captured part.

    Args:
        wrapper: The MegatronFSDP around the chunk.
    """

    flag = "use_megatron_fsdp"
    package = _MEGATRON_FSDP

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.parameters = list(wrapper.raw_param.values())

    @classmethod
    def of(cls, chunk: nn.Module) -> Self | None:
        """Return the shards of a chunk; None without Megatron-FSDP."""
        wrapper = wrapper_of(chunk, f"{_MEGATRON_FSDP}.megatron_fsdp", "MegatronFSDP")
        return None if wrapper is None else cls(wrapper)

    def facts(self) -> dict[str, object]:
        """Return the facts of the wrapper's options too."""
        config = self._wrapper.ddp_config
        return {**super().facts(), **{name: getattr(config, name, None) for name in _OPTIONS}}

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
            lasting.free = _keep_bucket
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
        self.gather()

    def gather(self) -> None:
        """Gather all buckets; those that a step has not changed are in place."""
        wrapper = self._wrapper
        wrapper._replace_param_with_raw_if_needed()
        wrapper.all_gather_and_wait_parameters_ready(self.parameters, prefetch=False)
        for parameter in self.parameters:
            # None between backwards; graphs accumulate in `grad`, which is reduced after each.
            vars(parameter).pop("main_grad", None)

    def show_gathered(self) -> None:
        """Undo the end of a step's reduction, which shows shards."""
        self._wrapper._replace_param_with_raw_if_needed()


def _keep_bucket(_bucket_id: int) -> None:
    """Keep a bucket's memory."""


_TORCH_WRAPPER = "megatron.core.distributed.torch_fully_sharded_data_parallel"


class TorchShards(Shards):
    """The parameters of one chunk that ``fully_shard`` shards.

    It gathers parameters in hooks of layers. At the end of a backward the hook of the outermost
    module, which surrounds the captured part, reduces what no layer has reduced.

    Args:
        wrapper: Megatron's wrapper around the chunk.
    """

    flag = "use_torch_fsdp2"
    package = "torch.distributed.fsdp"

    def __init__(self, wrapper: Any) -> None:
        self._parts: list[Any] = [m for m in wrapper.modules() if isinstance(m, FSDPModule)]
        self.parameters: list[nn.Parameter] = []

    @classmethod
    def of(cls, chunk: nn.Module) -> Self | None:
        """Return the shards of a chunk; None without FSDP2."""
        wrapper = wrapper_of(chunk, _TORCH_WRAPPER, "TorchFullyShardedDataParallel")
        return None if wrapper is None else cls(wrapper)

    def keep_in_place(self, undo: ExitStack) -> None:
        """Stop torch from freeing gathered parameters.

        Raises:
            ConfigError: This release of torch keeps them elsewhere.
        """
        if not hasattr(self._parts[0]._get_fsdp_state(), "_fsdp_param_groups"):
            raise ConfigError(
                f"FSDP2 of torch {torch.__version__} keeps its parameters elsewhere than that of "
                "2.13. Use torch 2.13, or train without FSDP2."
            )
        for group in self._groups():
            for parameter in group.fsdp_params:
                parameter.free_unsharded_param = _keep_parameter
                undo.callback(parameter.__dict__.pop, "free_unsharded_param", None)
        undo.callback(self._show_shards)
        self.gather()

    def gather(self) -> None:
        """Gather all parameters, which the optimizer may have changed."""
        self._show_shards()
        for part in self._parts:
            part.unshard()

    def show_gathered(self) -> None:
        """Undo the end of a backward, which shows shards."""
        for group in self._groups():
            group._to_unsharded()

    def _show_shards(self) -> None:
        """Show shards; gathered parameters keep their memory."""
        for part in self._parts:
            part.reshard()

    def _groups(self) -> list[Any]:
        return [g for part in self._parts for g in part._get_fsdp_state()._fsdp_param_groups]


def _keep_parameter() -> None:
    """Keep a parameter's memory."""


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
