"""The launcher's command line, up to the script; the rest belongs to the script.

This module does not import torch: ``chunkgraph launch`` checks all it can before it starts a
process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from chunkgraph._text import REPORT_WIDTH, did_you_mean
from chunkgraph.errors import ConfigError
from chunkgraph.launch.config_flags import merge_flags
from chunkgraph.launch.flags import add_flags
from chunkgraph.settings import Config, load_config

__all__ = [
    "DESCRIPTION",
    "LaunchOptions",
    "add_options",
    "explain_in_one_line",
    "options_from",
    "parse_options",
    "set_max_connections",
]

_DESCRIPTION = """\
Run a pretrain script of Megatron-LM, unmodified, with chunk graphs.

The script and its flags come last:

  chunkgraph launch --nproc-per-node 2 pretrain_gpt.py <Megatron's flags> \\
      --cuda-graph-impl local --cuda-graph-granularity chunk

Chunk graphs add these flags to the script:

{flags}

Megatron's --cuda-graph-warmup-steps sets the eager steps before the capture.

If RANK and WORLD_SIZE are set, as under torchrun, the script runs in this
process; otherwise chunkgraph starts its processes on this machine.
"""


def _describe_flags() -> str:
    """Format the help of the flags that chunk graphs add to the script."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        add_help=False,
        formatter_class=partial(argparse.HelpFormatter, width=REPORT_WIDTH),
    )
    add_flags(parser)
    return parser.format_help().strip()


DESCRIPTION = _DESCRIPTION.replace("{flags}", _describe_flags())


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of a launch.

    Attributes:
        script: The pretrain script.
        script_args: Flags of the script, including those from the configuration file.
        device: Device; ``cpu`` runs the script on a machine without a GPU.
        nproc: Number of processes of the job; None: the command line and the file set none.
        debug: Whether errors show tracebacks.
    """

    script: Path
    script_args: tuple[str, ...]
    device: str
    nproc: int | None
    debug: bool

    def rank_command(self) -> list[str]:
        """Return the arguments of Python for one rank."""
        command = ["-m", "chunkgraph.launch", "--device", self.device]
        return [*command, str(self.script), *self.script_args]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the launcher's options, the script and the script's flags."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="YAML file as in configs/; its settings become flags, unless the command line sets "
        "them",
    )
    parser.add_argument(
        "--nproc-per-node",
        metavar="N",
        type=int,
        help="processes to start (default: as the pipeline section of --config needs, or 1)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="cpu: run on a machine without a GPU, with gloo, for tests (default: the device "
        "of --config, or cuda)",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of the launcher")
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="such as pretrain_gpt.py")
    parser.add_argument(
        "script_args", metavar="...", nargs=argparse.REMAINDER, help="flags of the script"
    )


def options_from(args: argparse.Namespace) -> LaunchOptions:
    """Check everything that can be checked without Megatron.

    Raises:
        ConfigError: The script or a file is missing, or a flag has a wrong value.
    """
    script: Path = args.script
    if not script.is_file():
        problem = "is a folder" if script.is_dir() else "does not exist"
        raise ConfigError(
            f"script {script}: {problem}. Options of chunkgraph launch go before the script, flags "
            "of the script after it."
        )
    script_args: list[str] = list(args.script_args)
    of_flags = argparse.ArgumentParser(script.name, add_help=False, allow_abbrev=False)
    add_flags(of_flags)
    explain_in_one_line(of_flags)
    line = argparse.Namespace(cuda_graph_granularity=None)  # unless the line has it
    of_flags.parse_known_args(script_args, line)
    config: Config | None = None
    if args.config is not None:
        config = load_config(args.config)
        script_args = merge_flags(config, script_args, line)
    nproc = args.nproc_per_node
    if nproc is None:
        nproc = config.pipeline.world_size if config is not None else None
    elif nproc < 1:
        raise ConfigError(f"--nproc-per-node {nproc}: there must be at least one process.")
    device = "cuda"
    if config is not None and config.device != "auto":
        device = config.device
    return LaunchOptions(
        script=script,
        script_args=tuple(script_args),
        device=args.device or device,
        nproc=nproc,
        debug=args.debug,
    )


def parse_options(argv: Sequence[str], prog: str) -> LaunchOptions:
    """Parse a whole command line.

    Raises:
        ConfigError: See `options_from`.
        SystemExit: An option of the launcher itself is wrong, or the line asks for help.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    return options_from(parser.parse_args(list(argv)))


def set_max_connections(script_args: Sequence[str]) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS, unless it is set, where Megatron requires 1.

    Megatron requires 1 with tensor parallelism on some GPUs, and another value with FSDP.
    """
    if not {"--use-megatron-fsdp", "--use-torch-fsdp2"} & set(script_args):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def explain_in_one_line(parser: argparse.ArgumentParser) -> None:
    """Replace argparse's error, which prints Megatron's long usage on every rank."""

    def error(message: str) -> None:
        hint = ""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            name = unknown.split()[0].partition("=")[0]
            hint = did_you_mean(name, parser._option_string_actions)
        raise ConfigError(f"{parser.prog}: {message}.{hint}")

    parser.error = error  # type: ignore[assignment, method-assign]
