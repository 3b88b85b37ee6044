"""``chunkgraph launch``: run an unmodified Megatron pretrain script with chunk graphs."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from chunkgraph.cli.plan_memory import add_gpu_memory
from chunkgraph.errors import ConfigError
from chunkgraph.launch.options import DESCRIPTION, add_options, options_from

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser", "run"]


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
        help="train nothing and need no GPU: print slots, graphs and memory, and what is refused; "
        "--nproc-per-node then counts all processes",
    )
    add_gpu_memory(parser)
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, which is the script's own if the script fails."""
    options = options_from(args)
    if "--plan" in args.script_args:
        raise ConfigError("--plan belongs before the script; what follows it is the script's own.")
    if args.gpu_memory is not None and not args.plan:
        raise ConfigError("--gpu-memory compares the memory of a plan; add --plan.")
    if args.plan:
        from chunkgraph.cli.launch_plan import print_plan

        return print_plan(options, args.gpu_memory)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        # torchrun or srun started this process as one rank.
        from chunkgraph.launch.__main__ import main

        return main(options)
    from chunkgraph.jobs.launcher import Launcher

    for note in options.notes:
        print(f"note: {note}.", file=sys.stderr)
    environment = {"OMP_NUM_THREADS": "1"}  # as with torchrun
    if options.device == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    Launcher(
        command=options.rank_command(),
        num_ranks=options.nproc,
        environment=environment,
        debug=options.debug,
    ).run()
    return 0
