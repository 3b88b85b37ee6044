"""Parsed arguments of Megatron with chunk graphs, for tests without its training program."""

from __future__ import annotations

import argparse
from typing import Any

from chunkgraph.launch.flags import FLAGS


def arguments(**changes: Any) -> argparse.Namespace:
    """Return arguments of a small job with these changes."""
    values = {
        **{item.dest: None for item in FLAGS},
        "cuda_graph_granularity": "chunk",
        "cuda_graph_impl": "local",
        "cuda_graph_warmup_steps": 3,
        "cuda_graph_modules": [],
        "inference_cuda_graph_scope": None,
        "transformer_impl": "local",
        "micro_batch_size": 1,
        "context_parallel_size": 1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "te_rng_tracker": False,
        "num_experts": None,
        "moe_expert_capacity_factor": None,
    }
    return argparse.Namespace(**{**values, **changes})
