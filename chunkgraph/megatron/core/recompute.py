"""Enable activation recomputation while a graph is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

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

    Megatron saves and restores the states of its RNG tracker around a recomputation, as references
    to generators, which a capture does not see. Here it saves the state of the default generator:
    captures then refuse dropout in what is recomputed, as they do for torch's checkpoints.
    """
    (function,) = private_names(_RANDOM, "CheckpointFunction")

    def checkpoint(run: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        return function.apply(run, distribute_saved_activations, *args)

    generators = torch.cuda if has_gpu() else torch.random
    private_names(_RANDOM, "_get_all_rng_states", "_set_all_rng_states")

    def get_states() -> tuple[torch.Tensor]:
        return (generators.get_rng_state(),)

    def set_states(state: torch.Tensor) -> None:
        generators.set_rng_state(state)  # which captures replace

    states = {"_get_all_rng_states": get_states, "_set_all_rng_states": set_states}
    with contextlib.ExitStack() as stack:
        stack.callback(patch_attributes(import_megatron(_RANDOM), states))
        for name in (_RANDOM, "megatron.core.tensor_parallel"):
            private_names(name, "checkpoint")
            stack.callback(patch_attributes(import_megatron(name), {"checkpoint": checkpoint}))
        if not has_gpu():
            # Attention passes the mask type to its recomputation in a small host tensor.
            attention = import_megatron("megatron.core.transformer.attention")
            stack.callback(patch_attributes(attention, {"torch": HostTorch()}))
        yield
