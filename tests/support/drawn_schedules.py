"""Steps that are drawn as text and as SVG: one of each shape of picture."""

from __future__ import annotations

from chunkgraph.schedules import build_schedule

__all__ = ["CASES"]

CASES = [
    build_schedule("interleaved", num_ranks=4, num_chunks=2, num_microbatches=12),
    build_schedule("zb-h1", num_ranks=3, num_microbatches=11),
    build_schedule("1f1b", num_ranks=12, num_microbatches=3),
    build_schedule("gpipe", num_ranks=1, num_microbatches=1),
    build_schedule("interleaved-zb", num_ranks=2, num_chunks=2, num_microbatches=4),
    build_schedule("zb-v", num_ranks=3, num_chunks=2, num_microbatches=5),
    build_schedule("dualpipe-v", num_ranks=3, num_chunks=2, num_microbatches=7),
]
