"""Enable activation recomputation while a graph is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.core.host_tensors import HostTorch, has_gpu

__all__ = ["recomputing"]

_RANDOM = "megatron.core.tensor_parallel.random"


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Make Megatron's checkpoint recompute in a capture as it does in eager training.

    Later releases check their capture flag and then silently keep all activations, since their
    graphs end with each layer's forward. Here the backward is captured as well, by ``backward()``,
    so recomputation is legal and becomes part of the backward's graph.
    """
    (function,) = private_names(_RANDOM, "CheckpointFunction")

    def checkpoint(run: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        return function.apply(run, distribute_saved_activations, *args)

    with contextlib.ExitStack() as stack:
        for name in (_RANDOM, "megatron.core.tensor_parallel"):
            private_names(name, "checkpoint")
            stack.callback(patch_attributes(import_megatron(name), {"checkpoint": checkpoint}))
        if not has_gpu():
            # Attention passes the mask type to its recomputation in a small host tensor.
            attention = import_megatron("megatron.core.transformer.attention")
            stack.callback(patch_attributes(attention, {"torch": HostTorch()}))
        yield
