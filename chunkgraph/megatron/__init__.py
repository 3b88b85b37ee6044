"""Chunk graphs for Megatron-core: `attach`, and a CPU host to run it on.

The names below are imported on first use, so that a worker can refuse a bad configuration before
torch is loaded. The CPU host is in :mod:`chunkgraph.megatron.cpu.host`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkgraph.launch.hooks import enable
    from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach
    from chunkgraph.megatron.features.experts.padding import keep_padding_from_experts
    from chunkgraph.megatron.features.packing.bank import PackingOptions
    from chunkgraph.megatron.features.packing.banks import PackedBanks

__all__ = [
    "MegatronChunkGraphs",
    "PackedBanks",
    "PackingOptions",
    "attach",
    "enable",
    "keep_padding_from_experts",
]

_HOMES = {
    "MegatronChunkGraphs": "chunkgraph.megatron.attachment",
    "PackedBanks": "chunkgraph.megatron.features.packing.banks",
    "PackingOptions": "chunkgraph.megatron.features.packing.bank",
    "attach": "chunkgraph.megatron.attachment",
    "enable": "chunkgraph.launch.hooks",
    "keep_padding_from_experts": "chunkgraph.megatron.features.experts.padding",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
