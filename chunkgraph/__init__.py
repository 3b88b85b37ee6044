"""Pipeline model chunks captured once as graphs, replayed for any number of microbatches.

The public names are imported on first use, so that planning (``chunkgraph.schedules``,
``chunkgraph.slots``, ``chunkgraph plan``) never pays for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs

__all__ = ["CaptureOptions", "Chunk", "ChunkGraphs", "__version__"]

__version__ = "0.1.0"

_ENGINE_NAMES = frozenset({"CaptureOptions", "Chunk", "ChunkGraphs"})


def __getattr__(name: str) -> object:
    if name in _ENGINE_NAMES:
        from chunkgraph import engine

        return getattr(engine, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
