"""Settings and flags that no longer exist, each with its replacement."""

from __future__ import annotations

__all__ = ["SUCCESSORS", "successor"]

SUCCESSORS = {
    "packing.cuda_graph_cp_sizes": "Use packing.captured_context_parallel_sizes",
    "--cuda-graph-cp-eager-sizes": (
        "Pass all sizes to --cuda-graph-cp-sizes, and the sizes to capture to "
        "--cuda-graph-cp-captured-sizes"
    ),
    "--max-tokens-per-rank": "Use --cuda-graph-max-packed-tokens",
    "capture.memset_kernels": "Set the environment variable CHUNKGRAPH_MEMSET_KERNELS=0",
    "--cuda-graph-memset-kernels": "Set the environment variable CHUNKGRAPH_MEMSET_KERNELS=0",
    "capture.verify_every": "Use capture.num_verify_steps to verify fewer steps",
    "--cuda-graph-verify-every": "Use --cuda-graph-num-verify-steps to verify fewer steps",
    "train.tensorboard_dir": "Use the option --json, which writes the same numbers of every step",
    "stash.skips_single_slots": "Leave it out; chunks with one slot stash like the others",
    "--cuda-graph-stash-skips-single-slots": (
        "Leave it out; chunks with one slot stash like the others"
    ),
}
"""Replacement by dotted path or flag."""


def successor(name: str) -> str:
    """Return a sentence that names the replacement; ``""`` if the name never existed."""
    remedy = SUCCESSORS.get(name)
    return "" if remedy is None else f"{name} no longer exists. {remedy}."
