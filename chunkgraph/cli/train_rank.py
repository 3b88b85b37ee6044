"""Run ``chunkgraph train`` as one rank of a job that torchrun, srun or the like started.

The process itself trains instead of starting workers. Rank 0 shows progress and prints the
report. An error that all ranks have in common is printed once; see ``_wait_for_the_launcher``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.jobs.exit_codes import exit_code_of, is_usage_error
from chunkgraph.jobs.processes import die_with_parent, guard_session, leave
from chunkgraph.settings import Config, resolved, to_yaml

__all__ = ["StartedRank", "train_as_rank"]

_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class StartedRank:
    """This process's place in a job, named as in torchrun's environment variables."""

    rank: int
    """Index of the process in the job."""
    world_size: int
    """Number of processes of the job."""
    local_rank: int
    """Index of the process on its machine."""
    local_world_size: int
    """Number of processes of the job on this machine."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> StartedRank | None:
        """Read RANK, WORLD_SIZE and the rest; return None if this process is not a rank of a job.

        Raises:
            ConfigError: A required variable is missing, or a value is invalid.
        """
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                msg = (
                    "RANK and WORLD_SIZE are set, so this process is taken for one rank of a job, "
                    f"but {name} is not set. Start the job by torchrun or scripts/, or unset RANK "
                    "and WORLD_SIZE to let this command start the processes itself."
                )
                raise ConfigError(msg)
        rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        started = cls(
            rank=rank,
            world_size=world_size,
            local_rank=_number(environment, "LOCAL_RANK", rank),
            local_world_size=_number(environment, "LOCAL_WORLD_SIZE", world_size),
        )
        if not rank < world_size:
            msg = f"RANK is {rank}, but WORLD_SIZE is {world_size}: ranks are numbered from 0."
            raise ConfigError(msg)
        return started


def train_as_rank(args: argparse.Namespace, started: StartedRank) -> NoReturn:
    """Train as this rank, and end the process with the exit code.

    Args:
        args: The subcommand's arguments.
        started: This process's place in the job.
    """
    die_with_parent()
    guard_session()
    # The launcher handles interrupts. A rank has nothing to save, and a rank that waits inside a
    # collective would never run a Python handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        code = _train(args, started)
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        code = _report_error(args, started, error)
    leave(code)


def _train(args: argparse.Namespace, started: StartedRank) -> int:
    from chunkgraph.cli.train_setup import checked_config, report, run_folder, worker_environment

    is_first = started.rank == 0
    config = checked_config(args, num_local_ranks=started.local_world_size)
    _check_world_size(config, started)
    for name, value in worker_environment(config, debug=args.debug).items():
        # The loopback interface only connects ranks of the same machine.
        if name != "GLOO_SOCKET_IFNAME" or started.local_world_size == started.world_size:
            os.environ.setdefault(name, value)
    if not args.debug and not sys.warnoptions:
        warnings.simplefilter("ignore")  # PYTHONWARNINGS comes too late for this process
    from chunkgraph.cli.progress import TrainProgress
    from chunkgraph.jobs.reports import append_progress
    from chunkgraph.trainer.worker import train_rank

    if not is_first:
        train_rank(config)
        return 0
    with ExitStack() as stack:
        callbacks = []
        if args.run_dir is not None:
            run_dir = stack.enter_context(run_folder(args.run_dir))
            (run_dir / "config.yaml").write_text(to_yaml(resolved(config)), encoding="utf-8")
            callbacks.append(append_progress(run_dir / "progress.jsonl"))
        progress = stack.enter_context(TrainProgress(config))
        callbacks.append(progress.update)

        def on_progress(line: dict[str, Any]) -> None:
            for callback in callbacks:
                callback(line)

        results = train_rank(config, on_progress)
    return report(args, config, results)


def _check_world_size(config: Config, started: StartedRank) -> None:
    num_ranks = config.pipeline.world_size
    if started.world_size != num_ranks:
        pipeline = config.pipeline
        msg = (
            f"The configuration needs {num_ranks} process(es) (pipeline "
            f"{pipeline.pipeline_model_parallel_size} x tensor "
            f"{pipeline.tensor_model_parallel_size} x context {pipeline.context_parallel_size} x "
            f"data {pipeline.data_parallel_size}), but the job was started with "
            f"{started.world_size} (WORLD_SIZE). Start {num_ranks}, or change "
            "the sizes in the pipeline section."
        )
        raise TopologyError(msg)


def _report_error(args: argparse.Namespace, started: StartedRank, error: BaseException) -> int:
    """Print an error so that the user sees it once; return the exit code."""
    from chunkgraph.jobs.reports import describe_error, lost_a_peer

    is_usage = is_usage_error(error)
    if lost_a_peer(error) or (is_usage and started.local_rank != 0):
        _wait_for_the_launcher()
    if args.debug:
        traceback.print_exception(error)
    message = describe_error(error, started.rank)
    if is_usage and started.local_rank != 0:  # not what all ranks have in common
        message = f"Rank {started.rank} failed: {message}"
    print(f"error: {message}", file=sys.stderr)
    return exit_code_of(error)


def _wait_for_the_launcher() -> None:
    """Wait for the rank that explains the failure better.

    The launcher ends all ranks when the first one fails. If this rank is still alive after the
    wait, the error is its own or no launcher watches, and the caller prints the error.
    """
    time.sleep(_WAIT_S)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        msg = f"{name} is {text!r} in the environment; expected a number from 0."
        raise ConfigError(msg)
    return int(text)
