"""Chunk graphs for Megatron-core: the plug-in, a training run, and a CPU host to run it on.

The only room that imports Megatron or Transformer Engine. The names below are imported on first
use, so that a worker can refuse a bad configuration before torch is loaded. The CPU host is in
:mod:`chunkgraph.megatron.cpu_host`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkgraph.megatron.padding import keep_padding_from_experts
    from chunkgraph.megatron.plugin import MegatronChunkGraphs, attach
    from chunkgraph.megatron.pretrain import enable

__all__ = ["MegatronChunkGraphs", "attach", "enable", "keep_padding_from_experts"]

_HOMES = {
    "MegatronChunkGraphs": "plugin",
    "attach": "plugin",
    "enable": "pretrain",
    "keep_padding_from_experts": "padding",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"chunkgraph.megatron.{_HOMES[name]}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
