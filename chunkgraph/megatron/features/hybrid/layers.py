"""Megatron-core's hybrid models under the names of each release, and the mixers in them."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from chunkgraph.megatron.core.access import patch_attributes, private_names
from chunkgraph.megatron.features.packing.params import with_room

__all__ = [
    "can_recompute_hybrid_layers",
    "has_mamba_kernels",
    "local_stack",
    "mamba_mixers_of",
    "packed_mamba_rows",
]

_MIXER = "megatron.core.ssm.mamba_mixer"


def local_stack(stack: Any, norm: Any) -> Any:
    """``stack`` as a class whose last norm is ``norm``; Megatron's is Transformer Engine's.

    Args:
        stack: of `HybridNames`.
        norm: called with config, hidden size and eps.
    """

    class LocalStack(stack):
        """Megatron's stack without Transformer Engine."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, post_layer_norm=False, **kwargs)
            self.post_layer_norm = True
            if self.post_process:
                size, eps = config.hidden_size, config.layernorm_epsilon
                self.final_norm = norm(config=config, hidden_size=size, eps=eps)

    return LocalStack


def has_mamba_kernels() -> bool:
    """Whether Megatron's mixer found mamba-ssm and einops when it was imported."""
    found = private_names(_MIXER, "HAVE_MAMBA_SSM", "HAVE_EINOPS")
    return all(found)


def can_recompute_hybrid_layers() -> bool:
    """Whether the stack heeds full recomputation; earlier releases quietly keep everything."""
    return importlib.util.find_spec("megatron.core.recompute") is not None


def mamba_mixers_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The Mamba mixers among them."""
    mixer = getattr(sys.modules.get(_MIXER), "MambaMixer", None)
    return [] if mixer is None else [m for m in modules if isinstance(m, mixer)]


@contextlib.contextmanager
def packed_mamba_rows() -> Iterator[None]:
    """Let mixers that number the documents' rows themselves do it without the host.

    Earlier releases do it in each mixer, by a count that is read on the host; later ones are given
    the numbers with the offsets. The numbers are the same.
    """
    mixer = getattr(sys.modules.get(_MIXER), "MambaMixer", None)
    if not hasattr(mixer, "_create_packed_seq_idx"):
        yield
        return

    def create(_self: Any, params: Any, total_tokens: int) -> torch.Tensor:
        padded = params.cu_seqlens_q_padded
        offsets = params.cu_seqlens_q if padded is None else padded
        rows = torch.arange(total_tokens, device=offsets.device)
        found = torch.searchsorted(offsets[1:].long(), rows, right=True)
        return with_room(found.to(torch.int32).unsqueeze(0))

    undo = patch_attributes(mixer, {"_create_packed_seq_idx": create})
    try:
        yield
    finally:
        undo()
