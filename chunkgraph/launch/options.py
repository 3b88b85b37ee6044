"""The command line of the launcher, up to the script; what follows is the script's own.

No torch here, as ``chunkgraph launch`` checks everything it can before it starts a process.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chunkgraph._text import REPORT_WIDTH
from chunkgraph.errors import ConfigError
from chunkgraph.launch.config_flags import merge_flags
from chunkgraph.launch.flags import FLAGS, check_flag_values
from chunkgraph.settings import Config, load_config

__all__ = ["DESCRIPTION", "LaunchOptions", "add_options", "options_from", "parse_options"]

_DESCRIPTION = """\
Run a pretrain script of Megatron-LM, unmodified, with chunk graphs.

The script and its flags stand last:

  chunkgraph launch --nproc-per-node 2 pretrain_gpt.py <Megatron's flags> \\
      --cuda-graph-impl local --cuda-graph-granularity chunk

Flags that chunk graphs bring to the script (chunkgraph config says more):
{flags}
Eager steps before the capture are Megatron's --cuda-graph-warmup-steps.

Where RANK and WORLD_SIZE are set, as by torchrun, the script runs in this
process; otherwise its processes are started on this machine.
"""


def _describe_flags() -> str:
    """List the flags, each with its values and the first sentence of its help."""
    lines = []
    for flag in FLAGS:
        values = f"{{{','.join(flag.choices)}}}" if flag.choices else "N"
        lines.append(f"  {flag.name} {values}{' ...' if flag.setting.is_list else ''}")
        sentence = re.split(r"(?<=[.;]) ", flag.setting.help)[0].rstrip(".;")
        lines += textwrap.wrap(
            sentence,
            REPORT_WIDTH,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


DESCRIPTION = _DESCRIPTION.replace("{flags}", _describe_flags())


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What to launch.

    Attributes:
        script: the pretrain script.
        script_args: its flags, those from the configuration file included.
        given_args: its flags on the command line.
        config: the configuration file's contents, or None.
        config_path: the configuration file, or None.
        device: ``cpu`` runs the script on a machine without a GPU.
        run_dir: where settings are saved, or None for Megatron's ``--save`` folder.
        nproc: processes to start.
        is_nproc_given: whether the command line says how many.
        debug: whether errors show tracebacks.
        notes: what the command line replaced of the configuration file.
    """

    script: Path
    script_args: tuple[str, ...]
    given_args: tuple[str, ...]
    config: Config | None
    config_path: Path | None
    device: str
    run_dir: Path | None
    nproc: int
    is_nproc_given: bool
    debug: bool
    notes: tuple[str, ...]

    def notes_on_processes(self, num_processes: int) -> list[str]:
        """What to say where ``num_processes`` run, but the configuration file is for others."""
        if self.config is None or num_processes == self.config.pipeline.world_size:
            return []
        note = (
            f"{num_processes} processes run, where the pipeline section of {self.config_path} is "
            f"for {self.config.pipeline.world_size}: Megatron makes the number of data-parallel "
            "copies from them"
        )
        return [note]

    def rank_command(self) -> list[str]:
        """What Python runs for one rank."""
        options = ["--device", self.device]
        if self.config_path is not None:
            options += ["--config", str(self.config_path)]
        if self.run_dir is not None:
            options += ["--run-dir", str(self.run_dir)]
        return ["-m", "chunkgraph.launch", *options, str(self.script), *self.given_args]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the launcher's options, the script and the rest of the line."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="YAML file as in configs/; its sections model, pipeline, moe, capture, packing "
        "and stash become flags, where the command line does not give them",
    )
    parser.add_argument(
        "--nproc-per-node",
        metavar="N",
        type=int,
        help="processes to start (default: what the pipeline section of --config needs, or 1)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="cpu: run on a machine without a GPU, with gloo, for tests (default: what --config "
        "says, or cuda)",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        help="save the resolved settings in DIR (default: the script's --save folder)",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of the launcher")
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="such as pretrain_gpt.py")
    parser.add_argument(
        "script_args", metavar="...", nargs=argparse.REMAINDER, help="flags of the script"
    )


def options_from(args: argparse.Namespace) -> LaunchOptions:
    """Check everything that can be checked without Megatron.

    Raises:
        ConfigError: the script or a file is missing, a flag has a wrong value.
    """
    script: Path = args.script
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "does not exist"
        raise ConfigError(
            f"script {script}: {what}. Options of chunkgraph launch stand before the script, flags "
            "of the script after it."
        )
    script_args: list[str] = list(args.script_args)
    config: Config | None = None
    notes: list[str] = []
    if args.config is not None:
        config = load_config(args.config)
        script_args, notes = merge_flags(config, script_args, source=str(args.config))
    check_flag_values(script_args)
    nproc = args.nproc_per_node
    if nproc is None:
        nproc = config.pipeline.world_size if config is not None else 1
    if nproc < 1:
        raise ConfigError(f"--nproc-per-node {nproc}: there must be at least one process.")
    device = "cuda"
    if config is not None and config.device != "auto":
        device = config.device
        if args.device not in (None, device):
            notes.append(f"--device {args.device} replaces device of {args.config}")
    return LaunchOptions(
        script=script,
        script_args=tuple(script_args),
        given_args=tuple(args.script_args),
        config=config,
        config_path=args.config,
        device=args.device or device,
        run_dir=args.run_dir,
        nproc=nproc,
        is_nproc_given=args.nproc_per_node is not None,
        debug=args.debug,
        notes=tuple(notes),
    )


def parse_options(argv: Sequence[str], prog: str) -> LaunchOptions:
    """Parse a whole command line.

    Raises:
        ConfigError: see `options_from`.
        SystemExit: an option of the launcher itself is wrong, or help was asked for.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    return options_from(parser.parse_args(list(argv)))
