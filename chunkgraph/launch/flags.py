"""The command line of a launch: the launcher's options, and flags of a script for chunk graphs.

`--cuda-graph-granularity chunk` adds flags to Megatron's command line. Each stands for a setting of
a configuration file and is derived from its declaration. A configuration file becomes flags, too:
its sections ``model``, ``pipeline``, ``moe``, ``capture``, ``packing`` and ``stash``. ``train``,
``data`` and ``run`` apply to ``chunkgraph train`` only; a pretrain script gets its steps, data and
tokenizer from its own flags.

This module does not import torch: the launcher checks all it can before it starts a process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from chunkgraph._text import REPORT_WIDTH, did_you_mean
from chunkgraph.errors import ConfigError
from chunkgraph.settings import (
    CaptureConfig,
    Config,
    PackingConfig,
    Section,
    StashConfig,
    load_config,
    settings_of,
)
from chunkgraph.settings.loader import problems_of
from chunkgraph.settings.models import Flag
from chunkgraph.settings.script_flags import flags_of, words_of

RECORD_VARIABLE = "CHUNKGRAPH_RECORD_STEPS"
"""Environment variable of a comparison's ranks: the run as JSON; see `StepRecorder`."""
GRANULARITY = "--cuda-graph-granularity"
SWITCH = "--chunkgraph"
"""The same as granularity ``chunk``, also where Megatron has graphs of that granularity."""
_WARMUP = "--cuda-graph-warmup-steps"
_SEQS = "packing.max_packed_seqs"
_BARE_SEQS = 50
"""Sequences of a packed microbatch if the flag is used without a number."""


class _Granularity(Section):
    granularity: Annotated[Literal["layer", "chunk"], Flag(GRANULARITY)] = "layer"
    """What one CUDA graph holds: the part that --cuda-graph-impl selects (layer), or a whole model
    chunk (chunk)."""


_OPTIONS = {item.path: item for item in settings_of(Config) if item.flag}
FLAGS = (*settings_of(_Granularity), *_OPTIONS.values())
"""The settings of all flags. Warmup steps use Megatron's own ``--cuda-graph-warmup-steps``."""


class _MegatronDefault(int):
    """Megatron's default for the warmup steps, marked to detect that the user set no number."""


class GraphFlags(Section):
    """The settings that the flags select with granularity ``chunk``."""

    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    packing: PackingConfig = Field(default_factory=PackingConfig)
    stash: StashConfig = Field(default_factory=StashConfig)
    token_drops: Literal["warn", "count", "raise", "rerun"] = "warn"
    schedule: str = "auto"
    turned_off: tuple[str, ...] = ()
    """Lines about Megatron's flags that training runs without."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to Megatron's parser."""
    group = parser.add_argument_group("chunk-wise CUDA graphs")
    is_megatrons = GRANULARITY in parser._option_string_actions
    group.add_argument(SWITCH, action="store_true", help=f"The same as {GRANULARITY} chunk.")
    for item in FLAGS:
        if item.flag == GRANULARITY and is_megatrons:
            continue
        of_text = "SIZE" if item.path.endswith("_memory") else "NAME"
        more: dict[str, Any] = {"type": item.kind, "metavar": of_text if item.kind is str else "N"}
        if choices := ("false", "true") if item.kind is bool else item.choices:
            more = {"choices": choices}
        elif item.is_list:
            more["nargs"] = "+"
        elif item.path == _SEQS:
            more |= {"nargs": "?", "const": _BARE_SEQS}
        # argparse formats help with %.
        has_default = item.default not in (None, ())
        default = f" (default: {' '.join(words_of(item.default))})" if has_default else ""
        text = f"{item.help}{default}"
        group.add_argument(str(item.flag), default=None, help=text.replace("%", "%%"), **more)
    parser.set_defaults(cuda_graph_granularity="layer", has_megatron_chunks=is_megatrons)
    warmup = parser._option_string_actions.get(_WARMUP)
    if warmup is not None and type(warmup.default) is int:
        warmup.default = _MegatronDefault(warmup.default)


def _values_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the settings whose flags were used, by path."""
    values: dict[str, Any] = {}
    for path, item in _OPTIONS.items():
        if (parsed := getattr(args, item.dest)) is None:
            continue
        if item.kind is bool:
            parsed = parsed == "true"
        elif item.is_list:
            parsed = tuple(parsed)
        values[path] = parsed
    return values


def leaves_to_megatron(args: argparse.Namespace) -> bool:
    """Return whether the flags ask for Megatron's own graphs of chunks, in a tree that has them."""
    is_asked = args.cuda_graph_granularity == "chunk" and not args.chunkgraph
    return is_asked and args.has_megatron_chunks and args.cuda_graph_impl != "none"


def read_flags(args: argparse.Namespace) -> GraphFlags | None:
    """Read the flags; return None if they ask for no chunk graphs, or for Megatron's own.

    Args:
        args: The namespace from Megatron's parser, with the flags of `add_flags`.

    Raises:
        ConfigError: Flags have wrong values or no effect; the error lists all of them.
    """
    given = _values_of(args)
    words = {path: " ".join([str(_OPTIONS[path].flag), *words_of(v)]) for path, v in given.items()}
    is_megatrons = leaves_to_megatron(args)
    if is_megatrons or not (args.chunkgraph or args.cuda_graph_granularity == "chunk"):
        words.pop("pipeline.schedule", None)  # it drives eager steps too
        if words:
            unused = ", ".join(words.values())
            place, remedy = f"{GRANULARITY} layer", f"{GRANULARITY} chunk"
            if is_megatrons:
                place, remedy = f"Megatron's --cuda-graph-impl {args.cuda_graph_impl}", SWITCH
            raise ConfigError(
                f"{unused} has no effect with {place}. Add {remedy}, or leave it out."
            )
        return None
    num_warmup_steps = getattr(args, "cuda_graph_warmup_steps", 0)
    if isinstance(num_warmup_steps, _MegatronDefault):
        num_warmup_steps = 0
    # Chunks are captured from the inputs of an eager step, so 0 is as early as 1.
    values: dict[str, Any] = {"capture": {"num_warmup_steps": num_warmup_steps or 1}}
    values |= {"packing": {}, "stash": {}}
    for path, value in given.items():
        section, _, name = path.partition(".")
        # The single settings of other sections have none here.
        values.get(section, values)[name] = value
    try:
        return GraphFlags.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(problems_of(error, GraphFlags, _named))) from None


def _named(path: str) -> str:
    """Return the path of a setting with the flag in place of its name."""
    name, bracket, index = path.partition("[")
    return f"{_OPTIONS[name].flag if name in _OPTIONS else name}{bracket}{index}"


# -- the launcher's own command line -------------------------------------------------------------

_DESCRIPTION = """\
Run a pretrain script of Megatron-LM, unmodified, with chunk graphs.
The script and its flags come last:

  chunkgraph launch --nproc-per-node 2 pretrain_gpt.py <flags> --chunkgraph

Chunk graphs add these flags to the script:

{flags}

Megatron's --cuda-graph-warmup-steps sets the eager steps before the capture.
Under torchrun (with RANK and WORLD_SIZE set) the script runs in this process.
"""


def _describe_flags() -> str:
    """Format the help of the flags that chunk graphs add to the script."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        add_help=False,
        formatter_class=partial(argparse.HelpFormatter, width=REPORT_WIDTH, max_help_position=8),
    )
    add_flags(parser)
    return parser.format_help().strip()


DESCRIPTION = _DESCRIPTION.replace("{flags}", _describe_flags())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the launcher's options, the script and the script's flags."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="YAML file as in configs/; its settings become flags",
    )
    parser.add_argument(
        "--nproc-per-node",
        metavar="N",
        type=int,
        help="processes to start (default: as --config needs, or 1)",
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


def settle_options(args: argparse.Namespace) -> argparse.Namespace:
    """Check everything that can be checked without Megatron, and add what the file sets.

    Args:
        args: Parsed options of `add_options`; changed in place. ``script_args`` then begins with
            the file's flags, ``device`` is known, and ``nproc_per_node`` is None if neither the
            command line nor the file sets it.

    Raises:
        ConfigError: The script or a file is missing, or a flag has a wrong value.
    """
    if not args.script.is_file():
        problem = "is a folder" if args.script.is_dir() else "does not exist"
        raise ConfigError(
            f"script {args.script}: {problem}. Options of chunkgraph launch go before the script, "
            "flags of the script after it."
        )
    if args.nproc_per_node is not None and args.nproc_per_node < 1:
        raise ConfigError(
            f"--nproc-per-node {args.nproc_per_node}: there must be at least one process."
        )
    of_flags = argparse.ArgumentParser(args.script.name, add_help=False, allow_abbrev=False)
    add_flags(of_flags)
    explain_in_one_line(of_flags)
    line = argparse.Namespace(cuda_graph_granularity=None)  # unless the line has it
    of_flags.parse_known_args(args.script_args, line)
    if args.config is not None:
        config = load_config(args.config)
        args.script_args = merge_flags(config, args.script_args, line)
        args.nproc_per_node = args.nproc_per_node or config.pipeline.world_size
        if config.device != "auto":
            args.device = args.device or config.device
    args.device = args.device or "cuda"
    return args


def parse_options(argv: Sequence[str], prog: str) -> argparse.Namespace:
    """Parse a whole command line.

    Raises:
        ConfigError: See `settle_options`.
        SystemExit: An option of the launcher itself is wrong, or the line asks for help.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    explain_in_one_line(parser)
    return settle_options(parser.parse_args(list(argv)))


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


# -- a configuration file as flags ----------------------------------------------------------------

_RIVALS = {
    "--num-virtual-stages-per-pipeline-rank": {
        "--num-layers-per-virtual-pipeline-stage",
        "--pipeline-model-parallel-layout",
    },
    "--recompute-granularity": {"--recompute-activations"},
    "--bf16": {"--fp16"},
}
"""Other flags of Megatron that decide the same, and that it refuses together."""


def merge_flags(config: Config, script_args: Sequence[str], line: argparse.Namespace) -> list[str]:
    """Put the file's values before the flags of the command line, which win as the last ones.

    Args:
        config: The contents of the file.
        script_args: Flags on the command line.
        line: The same flags, as a parser with `add_flags` reads them; None for absent ones. What
            they turn off takes the file's settings that need it along.

    Raises:
        ConfigError: A value has no flag in Megatron.
    """
    changes = _values_of(line)
    if line.cuda_graph_granularity == "layer" and not line.chunkgraph:
        changes["capture.enabled"] = False
    for path, value in changes.items():  # not checked yet
        section, _, name = path.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    names = {arg.partition("=")[0] for arg in script_args}
    flags = [flag for flag in flags_of(config) if names.isdisjoint(_RIVALS.get(flag[0], ()))]
    if config.capture.enabled:
        flags.append((SWITCH,))
    return [*(text for flag in flags for text in flag), *script_args]
