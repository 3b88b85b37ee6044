"""``chunkgraph launch``: run an unmodified Megatron pretrain script with chunk graphs."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from chunkgraph._outputs import check_output
from chunkgraph._text import counted, shorten
from chunkgraph.cli.arguments import add_json
from chunkgraph.cli.plan_memory import add_gpu_memory, omissions_of, sizes_of
from chunkgraph.cli.plan_request import Request, schedule_name
from chunkgraph.cli.plan_tables import exit_code, print_rows, rows_of
from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import DESCRIPTION, add_options, settle_options
from chunkgraph.schedules import read_matching_schedule
from chunkgraph.slots import ModelSizes

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Mapping

    from chunkgraph.launch.flags import GraphFlags

_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
}
_BEFORE_SCRIPT = ("--plan", "--gpu-memory", "--nproc-per-node", "--compare", "--against")
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "launch",
        help="run Megatron's pretrain_gpt.py, unmodified, with chunk graphs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print slots, graphs, memory and refusals for --nproc-per-node processes in all, and "
        "train nothing",
    )
    add_gpu_memory(parser)
    parser.add_argument(
        "--compare",
        metavar="N",
        type=int,
        help="compare N steps with as many eager ones, in a table",
    )
    parser.add_argument(
        "--against",
        metavar="IMPL",
        default=[],
        type=lambda text: text.split(","),
        action="extend",
        help="and with Megatron's graphs: local,transformer_engine",
    )
    add_json(parser)
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, which is the script's own if the script fails."""
    for word in (arg.partition("=")[0] for arg in args.script_args):
        if word.replace("_", "-") in _BEFORE_SCRIPT:
            raise ConfigError(
                f"{shorten(word)} belongs before the script; what follows it is the script's own."
            )
    if args.gpu_memory is not None and not args.plan:
        raise ConfigError("--gpu-memory compares the memory of a plan; add --plan.")
    if (args.against or args.json) and args.compare is None:
        raise ConfigError("--against and --json belong to a comparison; add --compare.")
    if wrong := {*args.against} - {"local", "transformer_engine"}:
        raise ConfigError(f"--against {shorten(min(wrong))}: give local,transformer_engine or one.")
    if args.compare is not None and (args.plan or args.compare < 1 or "RANK" in os.environ):
        raise ConfigError(
            "--compare N trains N >= 1 steps in processes that it starts here. Leave --plan, "
            "torchrun and srun out."
        )
    check_output("--json", args.json)
    settle_options(args)
    if args.plan:
        return _print_plan(args)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        # torchrun or srun started this process as one rank.
        from chunkgraph.launch.__main__ import main

        return main(args)
    from chunkgraph.jobs.launcher import Launcher, check_gpus

    num_ranks = args.nproc_per_node or 1
    if args.device == "cuda" and num_ranks > 1:  # one may only print the script's help
        check_gpus(num_ranks, "Lower --nproc-per-node, or add --device cpu.")
    environment = {"OMP_NUM_THREADS": "1"}  # as with torchrun
    if args.device == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo"

    def launch(more: Mapping[str, str]) -> None:
        Launcher(
            command=[
                *("-m", "chunkgraph.launch", "--device", args.device),
                *(str(args.script), *args.script_args),
            ],
            num_ranks=num_ranks,
            environment={**environment, **more},
            debug=args.debug,
        ).run()

    if args.compare is not None:
        from chunkgraph.cli.launch_compare import compare

        return compare(launch, args.compare, args.against, args.json)
    launch({})
    return 0


def _print_plan(options: argparse.Namespace) -> int:
    """Plan the command line, print the plan, and return the exit code.

    Raises:
        ConfigError: The flags cannot be combined, or the script does not parse them.
    """
    from rich.console import Console

    from chunkgraph.launch.__main__ import planned_arguments

    args, flags = planned_arguments(options)
    request = request_of_arguments(args, flags, options.gpu_memory)
    rows = rows_of(request)
    console = Console(highlight=False, markup=False)
    sizes = "".join(
        f", {part} {size}"
        for part, name in _SIZES.items()
        if (size := getattr(args, name, None) or 1) > 1
    )
    console.print(
        f"{shorten(options.script.name)} on {counted(args.world_size, 'process')} (data "
        f"{args.data_parallel_size}{sizes}): all flags are compatible with chunk graphs. Layer "
        "specs, hooks and wrappers are checked when the model is built.",
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
    largest = args.global_batch_size or rows
    if steps := getattr(args, "step_batch_size_schedule", None):  # "THRESHOLD:SIZE THRESHOLD:SIZE"
        largest = max(int(step.rpartition(":")[2]) for step in steps.split())
    num_microbatches = max(1, largest // rows)
    file = read_matching_schedule(
        flags.schedule, num_ranks, num_chunks, [num_microbatches], "--global-batch-size"
    )
    omissions: list[str] = []
    notes: list[str] = []
    model = _model(args, flags, num_ranks * num_chunks, omissions, notes)
    if model is None and gpu_bytes is not None:
        raise ConfigError("--gpu-memory: memory is not estimated for hybrid models; leave it out.")
    return Request(
        schedule=schedule_name(flags.schedule, num_chunks),
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
    is_float = not (getattr(args, "bf16", False) or getattr(args, "fp16", False))
    has_groups = getattr(args, "group_query_attention", False)
    # The names of Megatron's configuration that differ from those of its arguments.
    values: dict[str, Any] = {
        **vars(args),
        "num_moe_experts": getattr(args, "num_experts", None),
        "num_layers": num_layers,
        "vocab_size": args.padded_vocab_size or args.vocab_size or 1,
        "params_dtype": "float32" if is_float else "bfloat16",
        "num_query_groups": args.num_query_groups if has_groups else None,
    }
    omissions += omissions_of(values.get)
    packing = flags.packing
    seq_length, micro_batch_size = args.seq_length, args.micro_batch_size
    num_ranks = args.context_parallel_size
    if packing.max_packed_seqs and packing.max_packed_tokens:
        seq_length, micro_batch_size = packing.max_packed_tokens, 1
        num_ranks = 1 if packing.context_parallel_sizes else num_ranks
    return sizes_of(
        values.get,
        seq_length=-(-seq_length // num_ranks),
        micro_batch_size=micro_batch_size,
        num_copies=args.data_parallel_size * args.context_parallel_size,
        is_local=args.transformer_impl == "local" and not getattr(args, "use_flash_attn", False),
    )
