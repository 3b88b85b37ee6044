"""Settings and flags that no longer exist, each with what replaces it."""

from __future__ import annotations

__all__ = ["SUCCESSORS", "successor"]

SUCCESSORS = {
    "packing.cuda_graph_cp_sizes": "Use packing.captured_context_parallel_sizes",
    "--cuda-graph-cp-eager-sizes": (
        "Give all sizes to --cuda-graph-cp-sizes, and those with graphs to "
        "--cuda-graph-cp-captured-sizes"
    ),
    "--max-tokens-per-rank": "Use --cuda-graph-max-packed-tokens",
    "capture.memset_kernels": "Set the environment variable CHUNKGRAPH_MEMSET_KERNELS=0",
    "--cuda-graph-memset-kernels": "Set the environment variable CHUNKGRAPH_MEMSET_KERNELS=0",
    "capture.verify_every": "Use capture.num_verify_steps to verify fewer steps",
    "--cuda-graph-verify-every": "Use --cuda-graph-num-verify-steps to verify fewer steps",
    "train.tensorboard_dir": "Give the command --json, which writes the same numbers of every step",
    "stash.skips_single_slots": "Leave it out; chunks with one slot stash as the others do",
    "--cuda-graph-stash-skips-single-slots": (
        "Leave it out; chunks with one slot stash as the others do"
    ),
}
"""What to write instead, by dotted path or flag."""


def successor(name: str) -> str:
    """Say what replaces a setting or flag; ``""`` where the name never existed."""
    todo = SUCCESSORS.get(name)
    return "" if todo is None else f"{name} no longer exists. {todo}."
