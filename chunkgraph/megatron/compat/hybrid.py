"""Megatron-core's hybrid models under the names of each release, and the mixers in them."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from chunkgraph.megatron.compat.access import patch_attributes, private_names

__all__ = [
    "HybridNames",
    "can_recompute_hybrid_layers",
    "has_mamba_kernels",
    "hybrid_names",
    "is_hybrid_model",
    "is_stack",
    "local_stack",
    "mamba_mixers_of",
    "packed_mamba_rows",
    "room_behind",
    "with_room",
]

_MIXER = "megatron.core.ssm.mamba_mixer"
_HYBRID = "megatron.core.models.hybrid"
_ROWS_AT_ONCE = 64
"""Of which causal-conv1d's forward reads the documents; behind the last row too, up to 1.6.1."""


class HybridNames:
    """The model and the stack of the installed release.

    Attributes:
        model: HybridModel, before it MambaModel.
        stack: HybridStack, before it MambaStack.
        submodules: the dataclass of the stack's layers.
        spec_argument: the model's argument for the spec of the stack.
        pattern_argument: the model's argument for the layers.
        knows_stages: whether the pattern may say where stages end, and stages interleave.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec(_HYBRID) is not None:
            (self.model,) = private_names(f"{_HYBRID}.hybrid_model", "HybridModel")
            self.stack, self.submodules = private_names(
                f"{_HYBRID}.hybrid_block", "HybridStack", "HybridStackSubmodules"
            )
            self._specs = f"{_HYBRID}.hybrid_layer_specs", "hybrid_stack_spec"
        else:
            (self.model,) = private_names("megatron.core.models.mamba.mamba_model", "MambaModel")
            self.stack, self.submodules = private_names(
                "megatron.core.ssm.mamba_block", "MambaStack", "MambaStackSubmodules"
            )
            self._specs = "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"
        arguments = inspect.signature(self.model.__init__).parameters
        self.spec_argument = next(name for name in arguments if name.endswith("stack_spec"))
        self.knows_stages = "hybrid_layer_pattern" in arguments and "vp_stage" in arguments
        self.pattern_argument = (
            "hybrid_layer_pattern"
            if "hybrid_layer_pattern" in arguments
            else "hybrid_override_pattern"
        )

    def transformer_engine_spec(self) -> Any:
        """Megatron's own spec of the stack."""
        return private_names(*self._specs)[0]


def hybrid_names() -> HybridNames:
    """Those of the installed release.

    Raises:
        ConfigError: the release has moved one of them.
    """
    return HybridNames()


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


def room_behind(num_rows: int) -> int:
    """Rows behind the last one whose document may be read too (causal-conv1d's issue 67).

    Nothing comes of what is read there, but it has to be memory.
    """
    return -num_rows % _ROWS_AT_ONCE


def with_room(seq_idx: torch.Tensor) -> torch.Tensor:
    """The same documents of rows, [..., rows], with memory behind them; see `room_behind`."""
    rows = seq_idx.size(-1)
    room = room_behind(rows)
    return functional.pad(seq_idx, (0, room))[..., :rows] if room else seq_idx


def is_stack(module: object) -> bool:
    """Whether it is Megatron's stack of hybrid layers, or built on it."""
    return _is_one_of(module, {"HybridStack", "MambaStack"})


def is_hybrid_model(module: object) -> bool:
    """Whether it is Megatron's hybrid model, or built on it."""
    return _is_one_of(module, {"HybridModel", "MambaModel"})


def _is_one_of(module: object, names: set[str]) -> bool:
    """By name: to import the classes takes a second, and kernels that may be missing."""
    return any(
        base.__name__ in names and base.__module__.startswith("megatron.core.")
        for base in type(module).__mro__
    )
