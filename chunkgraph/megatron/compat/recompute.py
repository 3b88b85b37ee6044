"""Activation recomputation while a graph is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.megatron.compat.access import import_megatron, patch_attributes, private_names

__all__ = ["recomputing"]

_RANDOM = "megatron.core.tensor_parallel.random"


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Make Megatron's checkpoint recompute in a capture as it does in eager training.

    Later releases see their own flag of a capture and then quietly keep all activations, since
    their graphs end with each layer's forward. Here the backward is captured as well, by
    ``backward()``, so that the recomputation inside it is legal and goes into its graph.
    """
    (function,) = private_names(_RANDOM, "CheckpointFunction")

    def checkpoint(run: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        return function.apply(run, distribute_saved_activations, *args)

    with contextlib.ExitStack() as stack:
        for name in (_RANDOM, "megatron.core.tensor_parallel"):
            private_names(name, "checkpoint")
            stack.callback(patch_attributes(import_megatron(name), {"checkpoint": checkpoint}))
        if not torch.cuda.is_available():
            attention = import_megatron("megatron.core.transformer.attention")
            stack.callback(patch_attributes(attention, {"torch": _TorchOfTheHost()}))
        yield


class _HostTensor(torch.Tensor):
    """A tensor that would be on the host on a machine with a GPU, and is free to be read there."""

    def item(self) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return super().item()

    def detach(self) -> _HostTensor:
        return self


class _TorchOfTheHost:
    """The name ``torch`` in Megatron's attention on a CPU host.

    To recompute its core, attention passes the kind of mask through a small tensor on the host and
    reads it back, which a CUDA graph does not see and the recorder would take for a device read.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A tensor outside of the capture."""
        if "device" in kwargs:
            return torch.tensor(*args, **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return torch.tensor(*args, **kwargs).as_subclass(_HostTensor)
