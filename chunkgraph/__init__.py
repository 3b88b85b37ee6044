"""Pipeline model chunks captured once as graphs, replayed for any number of microbatches.

The public names are imported on first use, so that planning (``chunkgraph.schedules``,
``chunkgraph.slots``, ``chunkgraph plan``) never pays for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
    from chunkgraph.memory.sleeping import sleeping_memory

__all__ = ["CaptureOptions", "Chunk", "ChunkGraphs", "__version__", "sleeping_memory"]

__version__ = "0.1.0"

_ENGINE_NAMES = frozenset({"CaptureOptions", "Chunk", "ChunkGraphs"})


def __getattr__(name: str) -> object:
    if name in __all__:
        folder = "engine" if name in _ENGINE_NAMES else "memory.sleeping"
        return getattr(import_module(f"chunkgraph.{folder}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
