"""What captures and the eager passes beside them are surrounded by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from chunkgraph.megatron import compat
from chunkgraph.megatron.experts import Experts
from chunkgraph.megatron.tables import CachedTables

__all__ = ["capturing", "preserving", "running_beside"]


@contextmanager
def running_beside(
    fp8: compat.Fp8State | None, predictions: compat.TokenPrediction | None
) -> Iterator[None]:
    """Around an eager pass of ``verify``: DDP's hooks keep silent, as in a capture."""
    with ExitStack() as stack:
        stack.enter_context(compat.capture_flag())
        stack.enter_context(compat.recomputing())
        if fp8 is not None:
            stack.enter_context(fp8.beside())
        if predictions is not None:
            stack.enter_context(predictions.beside())
        yield


@contextmanager
def preserving(fp8: compat.Fp8State | None) -> Iterator[None]:
    """Puts back what Megatron keeps on the host, after a capture session."""
    with compat.preserve_rng(), fp8.preserved() if fp8 else nullcontext():
        yield


@contextmanager
def capturing(
    tables: CachedTables,
    predictions: compat.TokenPrediction | None,
    fp8: compat.Fp8State | None,
    experts: Experts | None,
) -> Iterator[None]:
    """Around captures: nothing of Megatron reads the device, and its state follows the graphs."""
    with ExitStack() as stack:
        stack.enter_context(compat.capture_flag())
        stack.enter_context(compat.recomputing())
        stack.enter_context(compat.packed_rope())
        stack.enter_context(tables.held())
        if fp8 is not None:
            stack.enter_context(fp8.capturing())
        if predictions is not None:
            stack.enter_context(predictions.capturing())
        if experts is not None:
            stack.enter_context(experts.capturing())
        yield
