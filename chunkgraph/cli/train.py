"""``chunkgraph train``: check everything that can be checked, train in processes, and report.

A process that torchrun, srun or this command's launcher started, with RANK and WORLD_SIZE set, is
one rank: it trains, and rank 0 shows progress and prints the report.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from chunkgraph._collector import collector_paused
from chunkgraph.cli.arguments import add_json
from chunkgraph.cli.train_setup import checked_config, report, worker_environment
from chunkgraph.errors import TopologyError, WorkerError
from chunkgraph.settings import Config

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from chunkgraph.trainer.results import RunResults

__all__ = ["add_parser", "run"]

_COMMAND = ("-m", "chunkgraph.cli")
"""Arguments of Python that run this command."""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "train",
        help="train a Megatron-core GPT with captured chunks, and compare with eager",
        description="Train a Megatron-core GPT with captured chunks. With train.compare: eager the "
        "same steps are trained eagerly too and compared to the last bit. Exit code 1 if anything "
        "differs, or if anything is captured after the first session.",
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as those in configs/")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings that replace the file's, such as train.num_microbatches=[4,6]",
    )
    add_json(parser)
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks, warnings and the output of workers"
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from chunkgraph.jobs.launcher import Launcher
    from chunkgraph.jobs.processes import leave
    from chunkgraph.jobs.rank import run_rank

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        leave(run_rank(lambda: _train_as_rank(args), debug=args.debug))
    config = checked_config(args)
    options = ["--debug"] if args.debug else []
    if args.json is not None:
        options += ["--json", str(args.json)]
    Launcher(
        command=(*_COMMAND, "train", *options, args.config, *args.overrides),
        num_ranks=config.pipeline.world_size,
        environment=worker_environment(config, debug=args.debug),
        debug=args.debug,
    ).run()
    return 0


def _train_as_rank(args: argparse.Namespace) -> int:
    """Train as the rank that the environment names, and report on rank 0."""
    # A rank has nothing to save, and one that waits in a collective would run no Python handler.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    num_ranks = int(os.environ["WORLD_SIZE"])
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    config = checked_config(args, num_local_ranks)
    _check_world_size(config, num_ranks)
    for name, value in worker_environment(config, debug=args.debug).items():
        # The loopback interface only connects ranks of the same machine.
        if name != "GLOO_SOCKET_IFNAME" or num_local_ranks == num_ranks:
            os.environ.setdefault(name, value)
    if not args.debug and not sys.warnoptions:
        warnings.simplefilter("ignore")  # PYTHONWARNINGS comes too late for this process
    with _output_to_stderr():
        results = _train(config, is_first=os.environ["RANK"] == "0", debug=args.debug)
    if os.environ["RANK"] == "0" and (failures := report(args, config, results)):
        raise WorkerError(f"the report lists {len(failures)} problem(s).")
    return 0


def _train(config: Config, *, is_first: bool, debug: bool) -> RunResults:
    """Return the results of the whole job, the same on every rank."""
    from chunkgraph.cli.progress import TrainProgress
    from chunkgraph.jobs.processes import keep_quiet

    if not debug:
        keep_quiet()
    progress = TrainProgress(config, is_shown=is_first)
    with ExitStack() as stack:
        with collector_paused():
            from chunkgraph.trainer.compare import train
            from chunkgraph.trainer.setup import training_process

            device = stack.enter_context(training_process(config))
        return train(config, device, on_step=progress.step, on_capture=progress.capture)


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send what libraries print to standard error: standard output is the report's."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
        sys.stdout.flush()
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _check_world_size(config: Config, num_ranks: int) -> None:
    pipeline = config.pipeline
    if num_ranks != pipeline.world_size:
        raise TopologyError(
            f"The configuration needs {pipeline.world_size} process(es) (pipeline "
            f"{pipeline.pipeline_model_parallel_size} x tensor "
            f"{pipeline.tensor_model_parallel_size} x context {pipeline.context_parallel_size} x "
            f"data {pipeline.data_parallel_size}), but the job was started with {num_ranks} "
            f"(WORLD_SIZE). Start {pipeline.world_size}, or change the sizes in the pipeline "
            "section."
        )
