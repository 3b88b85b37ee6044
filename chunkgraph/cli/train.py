"""``chunkgraph train``: check everything that can be checked, train in processes, and report.

A process that torchrun, srun or this command's launcher started, with RANK and WORLD_SIZE set, is
one rank: it trains, and rank 0 shows progress and prints the report.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING

from chunkgraph._collector import collector_paused
from chunkgraph._outputs import check_output, output_to_stderr
from chunkgraph._text import counted
from chunkgraph.cli.arguments import add_config, add_json
from chunkgraph.data import PackedText, read_documents
from chunkgraph.errors import ConfigError, MissingDependencyError, TopologyError, WorkerError
from chunkgraph.jobs.launcher import Launcher, check_gpus
from chunkgraph.settings import Config, derived_fields, load_config

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from chunkgraph.trainer.results import RunResults

_COMMAND = ("-m", "chunkgraph.cli")  # arguments of Python


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "train",
        help="train a Megatron-core GPT with captured chunks, and compare with eager",
        description="Train a Megatron-core GPT with captured chunks. With train.compare: eager the "
        "same steps are trained eagerly too and compared to the last bit. Exit code 1 if anything "
        "differs, or if anything is captured after the first session for another reason than room.",
    )
    add_config(parser, is_required=True)
    add_json(parser)
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks, warnings and the output of workers"
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from chunkgraph.jobs.processes import leave, run_rank

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        leave(run_rank(lambda: _train_as_rank(args), debug=args.debug))
    config = _checked_config(args)
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
    config = _checked_config(args, num_local_ranks)
    _check_world_size(config, num_ranks)
    for name, value in worker_environment(config, debug=args.debug).items():
        # The loopback interface only connects ranks of the same machine.
        if name != "GLOO_SOCKET_IFNAME" or num_local_ranks == num_ranks:
            os.environ.setdefault(name, value)
    if not args.debug and not sys.warnoptions:
        warnings.simplefilter("ignore")  # PYTHONWARNINGS comes too late for this process
    with output_to_stderr():
        results = _train(config, is_first=os.environ["RANK"] == "0", debug=args.debug)
    if os.environ["RANK"] == "0":
        from chunkgraph.cli.report import report

        if failures := report(config, results, args.json):
            raise WorkerError(f"the report lists {counted(len(failures), 'problem')}.")
    return 0


def _train(config: Config, *, is_first: bool, debug: bool) -> RunResults:
    """Return the results of the whole job, the same on every rank."""
    from chunkgraph.cli.report import TrainProgress
    from chunkgraph.jobs.processes import keep_quiet

    if not debug:
        keep_quiet()
    progress = TrainProgress(config, is_shown=is_first)
    with ExitStack() as stack:
        with collector_paused():
            from chunkgraph.trainer.compare import train
            from chunkgraph.trainer.setup import training_process

            device = stack.enter_context(training_process(config))
        return train(config, device, on_step=progress.step)


def _check_world_size(config: Config, num_ranks: int) -> None:
    pipeline = config.pipeline
    if num_ranks != pipeline.world_size:
        raise TopologyError(
            f"The configuration needs {pipeline.world_size} processes (pipeline "
            f"{pipeline.pipeline_model_parallel_size} x tensor "
            f"{pipeline.tensor_model_parallel_size} x context {pipeline.context_parallel_size} x "
            f"data {pipeline.data_parallel_size}), but the job was started with {num_ranks} "
            f"(WORLD_SIZE). Start {pipeline.world_size}, or change the sizes in the pipeline "
            "section."
        )


def _checked_config(args: argparse.Namespace, num_local_ranks: int | None = None) -> Config:
    """Load the configuration, and check everything that can be checked before training.

    Args:
        args: The subcommand's arguments.
        num_local_ranks: Number of ranks on this machine; None if all ranks are on it.

    Raises:
        ConfigError: A setting or option is wrong.
        MissingDependencyError: A required package is not installed.
    """
    config = resolve_device(load_config(args.config, args.overrides), num_local_ranks)
    check_packages(config)
    documents = read_documents(config.data.path)
    if not config.packing.max_packed_seqs:
        PackedText(documents, seq_length=config.model.seq_length, seed=config.train.seed)
    check_output("--json", args.json)
    return config


def resolve_device(config: Config, num_local_ranks: int | None = None) -> Config:
    """Choose CPU or GPU; import torch unless the configuration sets the CPU.

    Args:
        config: The run's configuration.
        num_local_ranks: Number of ranks on this machine, one GPU each; None if all ranks are on it.
    """
    device = config.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        check_gpus(
            config.pipeline.world_size if num_local_ranks is None else num_local_ranks,
            "Set device=cpu, or lower the sizes in the pipeline section.",
        )
    if device == "cpu" and config.model.layer_spec == "transformer_engine":
        raise ConfigError(
            "model.layer_spec is transformer_engine, which runs on GPUs only, but device is cpu. "
            "Set model.layer_spec=local, or device=cuda."
        )
    return config.replace(device=device)


def check_packages(config: Config) -> None:
    """Check for missing optional packages before any process starts.

    Raises:
        MissingDependencyError: A required package is not installed.
    """
    layers = config.model.layer_spec
    needs = {"megatron": ("megatron-core", "megatron", "to train")}
    if layers == "transformer_engine" or (layers == "auto" and config.device == "cuda"):
        needs["transformer_engine"] = ("Transformer Engine", "te", "for the layers of a GPU run")
    for module, (package, extra, purpose) in needs.items():
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(
                f"{package} is not installed; it is needed {purpose}. "
                f"Install it with: pip install 'chunkgraph[{extra}]'"
            )


def worker_environment(config: Config, *, debug: bool = False) -> dict[str, str]:
    """Return variables that must be set before a worker starts; the user's take precedence."""
    environment = {"OMP_NUM_THREADS": "1"}
    if config.device == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this machine
        # Importing Megatron loads torch's compiler for functions that only a GPU run calls. This
        # takes a third of a rank's start time.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if derived_fields(config).get("use_transformer_engine_op_fuser"):
        environment["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"  # Megatron asks for it with SwiGLU
    if not debug:
        environment["PYTHONWARNINGS"] = "ignore"  # importing Megatron prints a page of them
    return environment
