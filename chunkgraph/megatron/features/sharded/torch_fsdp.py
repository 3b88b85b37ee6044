"""Megatron's wrapper of torch's ``fully_shard`` (FSDP2) around one model chunk.

It gathers parameters in hooks of layers. At the end of a backward the hook of the outermost module,
which surrounds the captured part, reduces what no layer has reduced.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.features.sharded.shards import Shards, wrapper_of

__all__ = ["TorchShards"]

_MODULE = "megatron.core.distributed.torch_fully_sharded_data_parallel"


class TorchShards(Shards):
    """The parameters of one chunk that ``fully_shard`` shards.

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
        wrapper = wrapper_of(chunk, _MODULE, "TorchFullyShardedDataParallel")
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
                parameter.free_unsharded_param = _keep
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


def _keep() -> None:
    """Keep a parameter's memory."""
