"""Adapt Megatron-core's hybrid layers: the local stack, and the row numbers of Mamba mixers."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from chunkgraph.megatron.core.access import patch_attributes, private_names
from chunkgraph.megatron.features.packing.params import with_extra_rows

__all__ = [
    "can_recompute_hybrid_layers",
    "has_mamba_kernels",
    "local_stack",
    "mamba_mixers_of",
    "packed_mamba_rows",
]

_MIXER = "megatron.core.ssm.mamba_mixer"


def local_stack(stack: Any, norm: Any) -> Any:
    """Return a subclass of ``stack`` whose final norm is ``norm``, not Transformer Engine's.

    Args:
        stack: The stack class of `HybridNames`.
        norm: Norm class; called with config, hidden_size and eps.
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
    """Return whether Megatron's mixer could import mamba-ssm and einops."""
    return all(private_names(_MIXER, "HAVE_MAMBA_SSM", "HAVE_EINOPS"))


def can_recompute_hybrid_layers() -> bool:
    """Return whether the stack supports full recomputation; earlier releases ignore it."""
    return importlib.util.find_spec("megatron.core.recompute") is not None


def mamba_mixers_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the Mamba mixers among ``modules``."""
    mixer = getattr(sys.modules.get(_MIXER), "MambaMixer", None)
    return [] if mixer is None else [m for m in modules if isinstance(m, mixer)]


@contextlib.contextmanager
def packed_mamba_rows() -> Iterator[None]:
    """Make mixers number the documents' rows on the device.

    In earlier releases each mixer computes the numbers from a count that it reads on the host; in
    later ones they come with the offsets. The numbers are the same.
    """
    mixer = getattr(sys.modules.get(_MIXER), "MambaMixer", None)
    if not hasattr(mixer, "_create_packed_seq_idx"):
        yield
        return

    def create(_self: Any, params: Any, total_tokens: int) -> torch.Tensor:
        padded = params.cu_seqlens_q_padded
        offsets = params.cu_seqlens_q if padded is None else padded
        rows = torch.arange(total_tokens, device=offsets.device)
        documents = torch.searchsorted(offsets[1:].long(), rows, right=True)
        return with_extra_rows(documents.to(torch.int32).unsqueeze(0))

    undo = patch_attributes(mixer, {"_create_packed_seq_idx": create})
    try:
        yield
    finally:
        undo()
