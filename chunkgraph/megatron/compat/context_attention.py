"""The stream on which Transformer Engine's attention overlaps its exchange with other ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from chunkgraph.megatron.compat.access import import_megatron

__all__ = ["make_attention_stream"]


def make_attention_stream() -> None:
    """Make what Megatron makes for models with a static context-parallel size alone.

    Its attention gives the stream to Transformer Engine together with a microbatch's group. Once
    made it stays, as Megatron's own does.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    extension = import_megatron("megatron.core.extensions.transformer_engine")
    attention: Any = getattr(extension, "TEDotProductAttention", None)
    if attention is not None and getattr(attention, "cp_stream", None) is None:
        attention.cp_stream = torch.cuda.Stream()
