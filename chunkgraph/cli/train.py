"""``chunkgraph train``: check everything that can be checked, start the workers, and report."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from chunkgraph.cli.arguments import add_json
from chunkgraph.cli.train_setup import (
    STALL_GRACE_S,
    checked_config,
    report,
    run_folder,
    worker_environment,
)
from chunkgraph.settings import Config, resolved, to_yaml

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser", "run"]

_WORKER = "chunkgraph.trainer.worker:main"


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
        "--run-dir",
        metavar="DIR",
        type=Path,
        help="keep the resolved config, progress and results in DIR (empty or new)",
    )
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks, warnings and the output of workers"
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from chunkgraph.cli.train_rank import StartedRank, train_as_rank

    started = StartedRank.from_environment(os.environ)
    if started is not None:
        train_as_rank(args, started)
    config = checked_config(args)
    with run_folder(args.run_dir) as run_dir:
        return _train(args, config, run_dir)


def _train(args: argparse.Namespace, config: Config, run_dir: Path) -> int:
    from chunkgraph.cli.progress import TrainProgress
    from chunkgraph.jobs.launcher import Launcher
    from chunkgraph.trainer.results import read_results

    config_path = run_dir / "config.yaml"
    config_path.write_text(to_yaml(resolved(config)), encoding="utf-8")
    with TrainProgress(config) as progress:
        Launcher(
            command=("-m", "chunkgraph.jobs.worker_main", _WORKER, str(config_path), str(run_dir)),
            run_dir=run_dir,
            num_ranks=config.pipeline.world_size,
            stall_timeout_s=config.run.timeout_s + STALL_GRACE_S,
            environment=worker_environment(config, debug=args.debug),
            output=2,  # standard error: the report goes to standard output
            debug=args.debug,
            on_progress=progress.update,
        ).run()
    return report(args, config, read_results(run_dir / "rank0.json"))
