"""``chunkgraph launch --plan``: print slots, graphs and memory for a user's command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chunkgraph.cli.plan_memory import sizes_of
from chunkgraph.cli.plan_request import Request, schedule_name
from chunkgraph.cli.plan_tables import exit_code, print_rows, rows_of
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import read_matching_schedule
from chunkgraph.slots import ModelSizes

if TYPE_CHECKING:
    from chunkgraph.launch.flags import GraphFlags
    from chunkgraph.launch.options import LaunchOptions

__all__ = ["print_plan", "request_of_arguments"]

_NAMES = {"num_moe_experts": "num_experts"}
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
}
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")


def print_plan(options: LaunchOptions, gpu_bytes: int | None) -> int:
    """Plan the command line, print the plan, and return the exit code.

    Raises:
        ConfigError: The flags cannot be combined, or the script does not parse them.
    """
    from rich.console import Console

    from chunkgraph.launch.planned import planned_arguments

    num_processes = options.nproc if options.has_nproc_option else None
    args, flags = planned_arguments(options, num_processes)
    request = request_of_arguments(args, flags, gpu_bytes)
    rows = rows_of(request, range(request.num_ranks))
    console = Console(highlight=False)
    sizes = "".join(
        f", {part} {size}"
        for part, name in _SIZES.items()
        if (size := getattr(args, name, None) or 1) > 1
    )
    console.print(
        f"{options.script.name} on {args.world_size} processes (data {args.data_parallel_size}"
        f"{sizes}): all flags are compatible with chunk graphs. Layer specs, hooks and wrappers "
        "are checked when the model is built.",
        soft_wrap=True,
    )
    print_rows(console, request, rows)
    return exit_code(request, rows)


def request_of_arguments(
    args: argparse.Namespace, flags: GraphFlags, gpu_bytes: int | None = None
) -> Request:
    """Return the plan's input from Megatron's validated arguments.

    Raises:
        ConfigError: The schedule is a file that does not match the pipeline or the batch size, or
            memory is compared that is not estimated.
    """
    num_ranks = args.pipeline_model_parallel_size
    num_chunks = args.virtual_pipeline_model_parallel_size or 1
    rows = args.micro_batch_size * args.data_parallel_size
    num_microbatches = max(1, (args.global_batch_size or rows) // rows)
    file = read_matching_schedule(
        flags.schedule, num_ranks, num_chunks, [num_microbatches], "--global-batch-size"
    )
    omissions: list[str] = []
    notes: list[str] = []
    model = _model(args, flags, num_ranks * num_chunks, omissions, notes)
    if model is None and gpu_bytes is not None:
        raise ConfigError("--gpu-memory: memory is not estimated for hybrid models; leave it out.")
    return Request(
        schedule=schedule_name(flags.schedule, num_ranks, num_chunks),
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        group_size=getattr(args, "microbatch_group_size_per_vp_stage", None)
        if num_chunks > 1
        else None,
        num_microbatches=num_microbatches,
        model=model,
        gpu_bytes=gpu_bytes,
        omissions=tuple(omissions),
        notes=tuple(notes),
        file=file,
    )


def _model(
    args: argparse.Namespace,
    flags: GraphFlags,
    num_stages: int,
    omissions: list[str],
    notes: list[str],
) -> ModelSizes | None:
    """Return the model's sizes and add what they omit; None for a model without an estimate."""
    if any(getattr(args, name, None) for name in _PATTERNS):
        omissions.append("Memory is not estimated for hybrid models.")
        return None
    value = _value_of(args)
    num_layers = -(-args.num_layers // num_stages) * num_stages
    if num_layers != args.num_layers:
        notes.append(
            f"Memory counts {num_layers // num_stages} layers in every chunk; {args.num_layers} "
            "layers are not even over the stages."
        )
    if args.padded_vocab_size is None and args.vocab_size is None:
        omissions.append(
            "Memory leaves out embedding and output layer, whose size only the tokenizer knows; "
            "pass Megatron's --vocab-size to count them."
        )
    if getattr(args, "mtp_num_layers", None):
        omissions.append("Memory leaves out the layers of multi-token prediction.")
    changing = {
        "num_layers": num_layers,
        "vocab_size": args.padded_vocab_size or args.vocab_size or 1,
    }
    packing = flags.packing
    shape: dict[str, int] = {
        "seq_length": -(-args.seq_length // args.context_parallel_size),
        "micro_batch_size": args.micro_batch_size,
    }
    if packing.max_packed_seqs and packing.max_packed_tokens:
        ranks = 1 if packing.context_parallel_sizes else args.context_parallel_size
        shape = {"seq_length": -(-packing.max_packed_tokens // ranks), "micro_batch_size": 1}
    return sizes_of(
        lambda name: changing.get(name, value(name)),
        **shape,
        num_copies=args.data_parallel_size * args.context_parallel_size,
        is_local=args.transformer_impl == "local" and not getattr(args, "use_flash_attn", False),
    )


def _value_of(args: argparse.Namespace) -> Callable[[str], Any]:
    """Return a function that finds arguments by the names of Megatron's configuration."""
    is_float = not (getattr(args, "bf16", False) or getattr(args, "fp16", False))
    has_groups = getattr(args, "group_query_attention", False)
    special = {
        "params_dtype": "float32" if is_float else "bfloat16",
        "num_query_groups": args.num_query_groups if has_groups else None,
    }

    def value(name: str) -> Any:
        return special[name] if name in special else getattr(args, _NAMES.get(name, name), None)

    return value
