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
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
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
    Setting,
    StashConfig,
    derived_fields,
    load_config,
    settings_of,
)
from chunkgraph.settings.loader import problems_of
from chunkgraph.settings.models import Flag
from chunkgraph.settings.rule import Facts, Rule, check
from chunkgraph.settings.words import facts_of

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
        default = f" (default: {' '.join(_words_of(item.default))})" if has_default else ""
        text = f"{item.help}{default}"
        group.add_argument(str(item.flag), default=None, help=text.replace("%", "%%"), **more)
    parser.set_defaults(cuda_graph_granularity="layer", has_megatron_chunks=is_megatrons)
    warmup = parser._option_string_actions.get(_WARMUP)
    if warmup is not None and type(warmup.default) is int:
        warmup.default = _MegatronDefault(warmup.default)


def _words_of(value: Any) -> tuple[str, ...]:
    """Format a value of a setting as its flag's arguments; 0 stands for an empty list."""
    if isinstance(value, tuple):
        return tuple(text for one in value or (0,) for text in _words_of(one))
    if isinstance(value, bool):
        return (str(value).lower(),)
    return (repr(value).removesuffix(".0") if isinstance(value, float) else str(value),)


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
    words = {path: " ".join([str(_OPTIONS[path].flag), *_words_of(v)]) for path, v in given.items()}
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
    problems: list[str] = []
    default = CaptureConfig().num_warmup_steps
    num_warmup_steps = getattr(args, "cuda_graph_warmup_steps", default)
    if isinstance(num_warmup_steps, _MegatronDefault):
        num_warmup_steps = default
    # Chunks are captured from the inputs of an eager step, so 0 is as early as 1.
    num_warmup_steps = num_warmup_steps or 1
    values: dict[str, Any] = {"packing": {}, "stash": {}}
    values["capture"] = {"num_warmup_steps": num_warmup_steps}
    for path, value in given.items():
        switch = _OPTIONS[path].switch or ""
        if switch in _OPTIONS and not given.get(switch):
            problems.append(
                f"{words[path]} has no effect without {_OPTIONS[switch].flag}; add it, or leave "
                "this out."
            )
        section, _, name = path.partition(".")
        # The single settings of other sections have none here.
        values.get(section, values)[name] = value
    flags = None
    try:
        flags = GraphFlags.model_validate(values)
    except ValidationError as error:
        problems += problems_of(error, GraphFlags, _named)
    if problems:
        raise ConfigError("\n".join(problems))
    return flags


def _named(path: str) -> str:
    """Return the path of a setting with the flag in place of its name."""

    def name(match: re.Match[str]) -> str:
        return str(_OPTIONS[match[0]].flag) if match[0] in _OPTIONS else match[0]

    return re.sub(r"^[\w.]+", name, path)


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
_GRAPHS = ("capture", "packing", "stash")
"""Sections that have an effect only with graphs."""


def _has_one_chunk(config: Config) -> bool:
    return config.pipeline.num_model_chunks == 1


_WITHOUT_EFFECT: dict[str, Callable[[Config], bool]] = {
    "model.recompute_modules": lambda c: c.model.recompute_granularity != "selective",
    "pipeline.virtual_pipeline_model_parallel_size": _has_one_chunk,
    "pipeline.microbatch_group_size_per_vp_stage": _has_one_chunk,
    # Without graphs nothing would count the dropped tokens.
    "moe.moe_expert_rank_capacity_factor": lambda c: not c.capture.enabled,
}
"""Settings that Megatron does not need, or refuses, although they are not null."""


def _holds(f: Facts, limit: int | None) -> bool:
    return bool(f.stash and f.captures) and limit is not None


_NO_FLAG = "it has no flag; use null, or chunkgraph train"
_RULES = (
    Rule(
        "context_parallel_sizes: documents of a pretrain script are spread over ranks only with "
        "capture; use [], capture the chunks, or use chunkgraph train",
        lambda f: f.context_parallel_sizes and not f.captures,
    ),
    Rule(
        f"seq_buckets: {_NO_FLAG}",
        lambda f: bool(f.max_packed_seqs and f.captures) and f.seq_buckets is not None,
    ),
    Rule(f"initial_bytes: {_NO_FLAG}", lambda f: _holds(f, f.initial_bytes)),
    Rule(f"max_bytes: {_NO_FLAG}", lambda f: _holds(f, f.max_bytes)),
    Rule(
        "hybrid_layer_pattern: a configuration file cannot pass it to a pretrain script yet; use "
        "null and pass Megatron's --hybrid-layer-pattern and --spec, or use chunkgraph train"
    ),
    Rule(
        "layer_spec: it has no name on the command line; use auto, and pass --spec to the script",
        lambda f: f.layer_spec not in ("auto", "local", "transformer_engine"),
    ),
)
"""Rules for values that have no flag in Megatron."""


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
    return [*(text for flag in flags for text in flag), *script_args]


def flags_of(config: Config) -> list[tuple[str, ...]]:
    """Return the flags of all values, each with its arguments.

    Raises:
        ConfigError: A value has no flag in Megatron.
    """
    check(_RULES, facts_of(config), "these settings have no flags:")
    flags = [*_special_flags(config)]
    for item in settings_of(Config):
        if (value := _value_of(item, config)) is not None:
            own = item.flag and (item.flag, *_words_of(value))
            flags.append(own or (str(item.megatron), *_texts(item.name, value)))
    if config.capture.enabled:
        flags.append((SWITCH,))
    return flags


def _value_of(item: Setting, config: Config) -> Any:
    """Return the value of a setting; None if it has no flag, no effect, or its flag's default."""
    value = attrgetter(item.path)(config)
    is_for_graphs = bool(item.flag) or item.path.startswith(_GRAPHS)
    is_default = value == item.default if item.flag else value is False or value == ()
    if (
        (item.flag or item.megatron) is None
        or (is_for_graphs and not config.capture.enabled)
        or (item.switch and not attrgetter(item.switch)(config))
        or (item.path in _WITHOUT_EFFECT and _WITHOUT_EFFECT[item.path](config))
        or is_default
    ):
        return None
    return value


def _special_flags(config: Config) -> Iterator[tuple[str, ...]]:
    """Yield values that have several flags, or a flag of a different name."""
    model, pipeline = config.model, config.pipeline
    yield "--max-position-embeddings", str(model.seq_length)
    yield "--position-embedding-type", "rope"
    if model.params_dtype == "bfloat16":
        yield ("--bf16",)
    if model.layer_spec != "auto":
        yield "--transformer-impl", model.layer_spec
    # As in `chunkgraph train`: neither gated layers nor their neighbors have biases, experts are
    # not split over the tensor ranks, and the loss is the mean over all tokens of the step.
    if model.swiglu:
        yield ("--disable-bias-linear",)
    if config.moe.num_moe_experts is not None and pipeline.tensor_model_parallel_size > 1:
        yield "--expert-tensor-parallel-size", "1"
    if config.packing.max_packed_seqs and config.packing.context_parallel_sizes:
        yield ("--calculate-per-token-loss",)
    for name, value in derived_fields(config).items():
        if value is False and not name.startswith("moe_"):
            raise ConfigError(
                f"model.transformer_config.{name} is false, for which a pretrain script may have a "
                "flag of another name. Leave it out, and pass Megatron's flag to the script."
            )
        if value is not None and value is not False:
            yield f"--{name.replace('_', '-')}", *_texts(name, value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Format a value of Megatron's setting as the arguments of its flag."""
    if value is True:
        return ()
    if "freq" in name:  # Megatron evaluates it as an expression, which has no spaces
        return (str(value).replace(" ", ""),)
    return tuple(map(str, value if isinstance(value, (list, tuple)) else [value]))
