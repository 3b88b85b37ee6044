"""Megatron-FSDP around one model chunk.

It gathers parameters into temporary buckets in hooks of layers, and reduces gradients in hooks of
parameters. Gradients that no hook has taken are reduced by its own hook at the end of a backward,
which surrounds the captured part.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any, Self

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import private_names
from chunkgraph.megatron.features.sharded.shards import Shards, wrapper_of

__all__ = ["MegatronShards"]

_PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_OPTIONS = ("fsdp_double_buffer", "nccl_ub", "num_distributed_optimizer_instances")
_GUARDS = {"cpu", "to"}
"""Methods of parameters that guard against freed memory; stand-ins would inherit them."""
_WEIGHTS = ("model_weight_buffer", "transpose_weight_buffer")


class MegatronShards(Shards):
    """The parameters of one chunk in Megatron-FSDP.

    Args:
        wrapper: The MegatronFSDP around the chunk.
    """

    flag = "use_megatron_fsdp"
    package = _PACKAGE

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.parameters = list(wrapper.raw_param.values())

    @classmethod
    def of(cls, chunk: nn.Module) -> Self | None:
        """Return the shards of a chunk; None without Megatron-FSDP."""
        wrapper = wrapper_of(chunk, f"{_PACKAGE}.megatron_fsdp", "MegatronFSDP")
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
            f"{_PACKAGE}.param_and_grad_buffer", "TemporaryBucketAllocator"
        )
        for name in _WEIGHTS:
            lasting = temporary()
            lasting.free = _keep
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


def _keep(_bucket_id: int) -> None:
    """Keep a bucket's memory."""
