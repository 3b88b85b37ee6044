"""Megatron-FSDP around one model chunk: gather in place, reduce after every backward.

Megatron-FSDP gathers parameters into temporary buckets in hooks of layers, and reduces gradients in
hooks of parameters. A replay runs no such hooks, and reads parameters where they were. So the
buckets of parameters keep their memory, and all of them are gathered before a run of a schedule.
Gradients that no hook has taken are reduced by Megatron-FSDP itself at the end of each backward, in
hooks around the captured part.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from chunkgraph.megatron.core.access import private_names
from chunkgraph.megatron.core.data_parallel import FSDP_PACKAGE

__all__ = ["Shards"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_WEIGHTS = ("model_weight_buffer", "transpose_weight_buffer")


class Shards:
    """The sharded parameters of one model chunk.

    Args:
        wrapper: The MegatronFSDP around the chunk.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._parameters = list(wrapper.raw_param.values())
        self._had_shards = False

    def keep_in_place(self, undo: ExitStack) -> None:
        """Give gathered parameters memory that stays the same until ``undo`` is closed."""
        pipeline = self._wrapper.all_gather_pipeline
        pipeline.reset(preserve_non_fsdp_units=False)
        (temporary,) = private_names(
            f"{FSDP_PACKAGE}.param_and_grad_buffer", "TemporaryBucketAllocator"
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
        self.gather()

    def gather(self) -> None:
        """Point the modules at gathered parameters with this step's values."""
        wrapper = self._wrapper
        wrapper._replace_param_with_raw_if_needed()
        wrapper.all_gather_and_wait_parameters_ready(self._parameters, prefetch=False)
        for parameter in self._parameters:
            # None between backwards; graphs accumulate in `grad`, which is reduced after each.
            vars(parameter).pop("main_grad", None)

    def show_gathered(self) -> None:
        """Point the modules at gathered parameters, after the reduction of a step."""
        self._had_shards = self._wrapper.is_param_fsdp_distributed
        self._wrapper._replace_param_with_raw_if_needed()

    def show_shards(self) -> None:
        """Point the modules at shards, if they were before `show_gathered`."""
        if self._had_shards:
            self._wrapper._replace_param_with_distributed_if_needed()

    def remove_hooks(self, inner: Iterable[nn.Module], undo: ExitStack) -> None:
        """Remove the hooks of captured modules and of parameters until ``undo`` is closed."""
        for module in inner:
            for name in _HOOKS:
                _remove(getattr(module, name), undo)
        for parameter in self._parameters:
            _remove(parameter._post_accumulate_grad_hooks or {}, undo)


def _keep(_bucket_id: int) -> None:
    """Keep a bucket's memory."""


def _remove(hooks: dict[int, Any], undo: ExitStack) -> None:
    """Remove Megatron-FSDP's hooks; ``undo`` puts all hooks back in their order."""
    before = dict(hooks)
    own = [key for key, hook in hooks.items() if _is_own(hook)]
    if not own:
        return
    for key in own:
        del hooks[key]

    def restore() -> None:
        added = {key: hook for key, hook in hooks.items() if key not in before}
        hooks.clear()
        hooks.update({**before, **added})

    undo.callback(restore)


def _is_own(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__module__", "")).startswith(FSDP_PACKAGE)
