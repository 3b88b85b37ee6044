"""Arguments of Megatron with chunk graphs: its parser, and parsed ones without it."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from chunkgraph.launch.flags import FLAGS, add_flags


def arguments(**changes: Any) -> argparse.Namespace:
    """Return arguments of a small job with these changes."""
    values = {
        **{item.dest: None for item in FLAGS},
        "cuda_graph_granularity": "chunk",
        "chunkgraph": False,
        "has_megatron_chunks": False,
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


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """Return Megatron's parser with the flags of chunk graphs."""
    from chunkgraph.megatron.cpu.pretrain import cpu_pretrain_host

    with cpu_pretrain_host():
        from megatron.training import arguments

        result = argparse.ArgumentParser(allow_abbrev=False)
        arguments.add_megatron_arguments(result)
    result.add_argument("--export-kd-teacher-load")  # from ModelOpt, if it is installed
    result.add_argument("--flextron", action="store_true")  # from a script in Megatron's repository
    add_flags(result)
    return result
