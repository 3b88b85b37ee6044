"""Build the error for a failed capture."""

from __future__ import annotations

import torch

from chunkgraph.errors import CaptureError
from chunkgraph.graphs.location import location_of

__all__ = ["capture_failure"]


def capture_failure(label: str, error: Exception) -> CaptureError:
    """Return the error for a capture that ``error`` ended; it names the user's line, if any."""
    where = location_of(error)
    place = f"\n  at {where}" if where else ""
    first_line = next(iter(str(error).splitlines()), "")
    if isinstance(error, torch.OutOfMemoryError):
        return CaptureError(
            f"Capturing {label} ran out of memory: {first_line}{place}\n"
            "  To do: reduce the memory of the slots (a smaller microbatch or sequence, selective "
            "recompute, fewer slots if the number of microbatches is bounded), or train with "
            "fewer layers per rank; `chunkgraph plan CONFIG` estimates what each rank needs."
        )
    return CaptureError(
        f"Capturing {label} failed: {type(error).__name__}: {first_line}{place}\n"
        "  To do: move the line out of the chunk, or replace it by work on the device (no host "
        "reads, no data-dependent shapes, no synchronization)."
    )
