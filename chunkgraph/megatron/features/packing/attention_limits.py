"""Predict whether Transformer Engine has an attention kernel for packed sequences of a size.

Transformer Engine chooses kernels in the first forward, and reports only that none is available.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.packing import ContextLimits, PackedShape

__all__ = [
    "AttentionSite",
    "needs_tokens_in_pieces",
    "refuse_for_layers",
    "refuse_large_deterministic",
    "shares_keys",
    "why_refused",
]

_SM90 = (9, 0)
_LIMIT = 1 << 30
_LAST_KNOWN = (2, 20)


@dataclass(frozen=True, kw_only=True)
class AttentionSite:
    """The environment on which the choice of a kernel depends.

    Attributes:
        capability: Compute capability of the device; None without a GPU.
        is_deterministic: Whether only bitwise reproducible kernels are allowed.
        has_flash: Whether a FlashAttention that supports these sequences is installed.
        version: First two numbers of Transformer Engine's version; None if not installed.
    """

    capability: tuple[int, int] | None
    is_deterministic: bool
    has_flash: bool
    version: tuple[int, int] | None

    @classmethod
    def here(cls, device: torch.device, *, with_padding: bool) -> AttentionSite:
        """Return the site of this process.

        Args:
            device: Device of the attention.
            with_padding: Whether sequences may have padding after them (``pad_between_seqs``),
                which FlashAttention 2 does not support.
        """
        capability = None
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
        names = ["flash-attn-3", "flash-attn-4", *([] if with_padding else ["flash-attn"])]
        allowed = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
        return cls(
            capability=capability,
            is_deterministic=allowed == "0" or torch.are_deterministic_algorithms_enabled(),
            has_flash=any(_version(name) is not None for name in names),
            version=_version("transformer-engine"),
        )


def why_refused(site: AttentionSite, *, num_seqs: int, num_heads: int, max_seqlen: int) -> str:
    """Return why no kernel trains these sequences, or "".

    The rule is Transformer Engine's (2.20, ``get_attention_backend`` of
    ``pytorch/attention/dot_product_attention/utils.py``): on sm_90 the deterministic backward of
    cuDNN for packed sequences needs about 128 bytes of workspace for each query, key, head and
    sequence, so it is excluded from 2^30 of them on. The unfused attention does not support padding
    between sequences, or would store all scores.

    Args:
        site: The site of the attention.
        num_seqs: Sequences of a microbatch, including empty ones.
        num_heads: Query heads on this rank.
        max_seqlen: The kernel's maximum sequence length, in tokens.
    """
    size = num_seqs * num_heads * max_seqlen**2
    if (
        site.capability != _SM90
        or not site.is_deterministic
        or site.has_flash
        or site.version is None
        or site.version > _LAST_KNOWN  # later versions may have another limit and report it
        or size < _LIMIT
    ):
        return ""
    return (
        f"{num_seqs} packed sequences of up to {max_seqlen} tokens and {num_heads} heads: on this "
        "GPU (sm_90) Transformer Engine has no deterministic attention for them, because the "
        f"backward would need {128 * size / 2**30:.0f} GiB of workspace (sequences x heads x "
        f"tokens^2 is {size / _LIMIT:.3g} times the limit)"
    )


def refuse_large_deterministic(site: AttentionSite, shape: PackedShape, num_heads: int) -> None:
    """Refuse packed sequences that no kernel would train.

    Raises:
        ConfigError: No kernel would train them; the error lists possible changes.
    """
    reason = why_refused(
        site,
        num_seqs=shape.num_sequences,
        num_heads=num_heads,
        max_seqlen=shape.max_packed_tokens,
    )
    if reason:
        raise ConfigError(
            f"packing.max_packed_seqs ({shape.max_packed_seqs}) and the sequence length "
            f"(packing.max_packed_tokens, else model.seq_length: {shape.max_packed_tokens}): "
            f"{reason}"
            + (
                ""
                if shape.max_document_tokens is None
                else ", those of the tail included, none of which is longer than "
                f"max_document_tokens ({shape.max_document_tokens})"
            )
            + ". Lower one of them, allow kernels that are not bitwise reproducible "
            "(train.deterministic=false, NVTE_ALLOW_NONDETERMINISTIC_ALGO=1 or unset), or install "
            "FlashAttention 3 (flash-attn-3), which has such a kernel."
        )


def refuse_for_layers(
    chunks: Sequence[nn.Module], config: Any, shape: PackedShape, device: torch.device
) -> None:
    """Refuse such sequences for a built model with Transformer Engine's attention.

    Args:
        chunks: The model chunks.
        config: Megatron's TransformerConfig.
        shape: Shape of the packed sequences.
        device: Device of the parameters.

    Raises:
        ConfigError: No kernel would train them.
    """
    if _is_transformer_engines(chunks):
        tensor_size = getattr(config, "tensor_model_parallel_size", 1) or 1
        # It is not known here whether a script's sequences have padding between them.
        site = AttentionSite.here(device, with_padding=False)
        refuse_large_deterministic(site, shape, config.num_attention_heads // tensor_size)


def needs_tokens_in_pieces(
    chunks: Sequence[nn.Module], config: Any, limits: ContextLimits | None = None
) -> bool:
    """Return whether to warn about documents with context-parallel pieces without tokens.

    With four ranks on H200s (Transformer Engine 2.20.2), documents of 10 tokens and more, and heads
    that share keys, gradient norms of graphs differed from eager ones, and those of eager steps
    differed between memory layouts. Without shared keys or without empty pieces they were equal.
    The likely cause is Transformer Engine's issue 2448: cuDNN's backward sums the workspaces of
    heads, and a sequence without queries leaves its workspace uninitialized.

    Args:
        chunks: The model chunks.
        config: Megatron's TransformerConfig.
        limits: Limits of changing context-parallel sizes; None for the config's size.
    """
    size = getattr(config, "context_parallel_size", 1) or 1
    if limits is not None:
        size = 1 if limits.counts_padding else max(limits.group_sizes)
    return size > 1 and shares_keys(config) and _is_transformer_engines(chunks)


def shares_keys(config: Any) -> bool:
    """Return whether several attention heads share one head of keys and values.

    Args:
        config: Megatron's TransformerConfig, or its arguments.
    """
    groups = getattr(config, "num_query_groups", None)
    return (
        groups is not None
        and groups < config.num_attention_heads
        # Only in arguments: the number has an effect only with this flag.
        and getattr(config, "group_query_attention", True)
        and not getattr(config, "multi_latent_attention", False)
    )


def _is_transformer_engines(chunks: Sequence[nn.Module]) -> bool:
    """Return whether the attention is Transformer Engine's."""
    return any(
        kind.__module__.startswith("transformer_engine.") and "Attention" in kind.__name__
        for chunk in chunks
        for module in chunk.modules()
        for kind in type(module).__mro__
    )


def _version(distribution: str) -> tuple[int, int] | None:
    """Return the first two numbers of a distribution's version."""
    try:
        major, minor, *_ = importlib.metadata.version(distribution).split(".")
        return int(major), int(minor)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
