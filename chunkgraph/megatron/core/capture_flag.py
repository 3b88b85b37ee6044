"""Megatron's and Transformer Engine's flags of a capture, and the buffers that a capture uses."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import torch

from chunkgraph.megatron.core.access import import_megatron, private_names

__all__ = ["capture_flag", "global_buffers"]


def global_buffers() -> list[torch.Tensor]:
    """Return the work buffers that Megatron's layers share; each exists after its first use."""
    state = import_megatron("megatron.core.parallel_state")
    holder = getattr(state, "_GLOBAL_MEMORY_BUFFER", None)
    return list(getattr(holder, "buffer", {}).values())


@contextlib.contextmanager
def capture_flag() -> Iterator[None]:
    """Set the flags by which Megatron and Transformer Engine recognize a running capture.

    While they are set, DDP's parameter-gather and gradient hooks do nothing; chunkgraph sends
    their signals around every replay instead.
    """
    start, end = private_names(
        "megatron.core.transformer.cuda_graphs", "_set_capture_start", "_set_capture_end"
    )
    engine: ModuleType | None = None
    if "transformer_engine" in sys.modules:
        with contextlib.suppress(ImportError):
            engine = importlib.import_module("transformer_engine.pytorch.graph")
    start()
    if engine is not None:
        engine.set_capture_start()
    try:
        yield
    finally:
        if engine is not None:
            engine.set_capture_end()
        end()
