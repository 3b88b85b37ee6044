"""The flags that `--cuda-graph-granularity chunk` adds to Megatron's command line.

Each flag stands for a setting of a configuration file and is derived from its declaration. This
module does not import torch: the launcher checks flags before it starts any process.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ValidationError

from chunkgraph.errors import ConfigError
from chunkgraph.settings import (
    CaptureConfig,
    Config,
    PackingConfig,
    Section,
    Setting,
    StashConfig,
    models,
    settings_of,
)
from chunkgraph.settings.loader import problems_of

if TYPE_CHECKING:
    from chunkgraph.engine import CaptureOptions

__all__ = [
    "FLAGS",
    "GRANULARITY",
    "Flag",
    "GraphFlags",
    "add_flags",
    "flag_of",
    "read_flags",
]

_SEQS = "packing.max_packed_seqs"


@dataclass(frozen=True)
class Flag:
    """A flag and the setting that it stands for."""

    setting: Setting

    @property
    def path(self) -> str:
        """Return the dotted path of the setting."""
        return self.setting.path

    @property
    def name(self) -> str:
        """Return the flag as written on the command line."""
        assert self.setting.flag is not None
        return self.setting.flag

    @property
    def dest(self) -> str:
        """Return the name of the parsed argument."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the words that the flag accepts; empty if it accepts numbers or a name."""
        return ("false", "true") if self.setting.kind is bool else self.setting.choices

    def text_of(self, value: Any) -> tuple[str, ...]:
        """Format a value of the setting as the flag's arguments; 0 stands for an empty list."""
        if isinstance(value, tuple):
            return tuple(text for one in value or (0,) for text in self.text_of(one))
        if isinstance(value, bool):
            return (str(value).lower(),)
        return (repr(value).removesuffix(".0") if isinstance(value, float) else str(value),)

    def value_of(self, parsed: Any) -> Any:
        """Turn a parsed argument into a value of the setting."""
        if self.setting.kind is bool:
            return parsed == "true"
        if self.setting.is_list:
            return () if self.setting.is_optional and parsed == [0] else tuple(parsed)
        return parsed

    def format(self, value: Any) -> str:
        """Format the flag with a value of the setting, for messages."""
        return " ".join([self.name, *self.text_of(value)])


class _Granularity(Section):
    granularity: Annotated[Literal["layer", "chunk"], models.Flag("--cuda-graph-granularity")] = (
        "layer"
    )
    """What one CUDA graph holds: the part that --cuda-graph-impl selects, as without this flag
    (layer), or a whole model chunk, captured once per slot and replayed for any number of
    microbatches (chunk)."""


_BARE_SEQS = 50
"""Sequences of a packed microbatch if the flag is used without a number."""
_GRANULARITY = Flag(next(settings_of(_Granularity)))
GRANULARITY = _GRANULARITY.name
_WARMUP = "--cuda-graph-warmup-steps"
_OPTIONS = {item.path: Flag(item) for item in settings_of(Config) if item.flag is not None}
FLAGS = (_GRANULARITY, *_OPTIONS.values())
"""All flags. Warmup steps use Megatron's own ``--cuda-graph-warmup-steps``."""


def flag_of(path: str) -> str:
    """Return the flag of a setting."""
    return _OPTIONS[path].name


class _MegatronDefault(int):
    """Megatron's default for the warmup steps, marked to detect that the user set no number."""


@dataclass(frozen=True, kw_only=True)
class GraphFlags:
    """The settings that the flags select with granularity ``chunk``.

    Attributes:
        capture: Settings of the capture.
        packing: Settings of packed sequences.
        token_drops: Reaction to tokens that an expert has no room for.
        stash: Settings of the stash for activations of experts.
        schedule: Schedule of training steps.
        turned_off: Lines about Megatron's flags that training runs without.
    """

    capture: CaptureConfig = field(default_factory=CaptureConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    token_drops: Literal["warn", "count", "raise", "rerun"] = "warn"
    stash: StashConfig = field(default_factory=StashConfig)
    schedule: str = "auto"
    turned_off: tuple[str, ...] = ()

    def capture_options(self) -> CaptureOptions:
        """Return the capture options for the engine."""
        from chunkgraph.engine import CaptureOptions

        return CaptureOptions(**self.capture.model_dump(exclude={"enabled", "scope"}))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to Megatron's parser."""
    group = parser.add_argument_group("chunk-wise CUDA graphs")
    for flag in FLAGS:
        item = flag.setting
        more: dict[str, Any] = {"type": item.kind, "metavar": "NAME" if item.kind is str else "N"}
        if flag.choices:
            more = {"choices": flag.choices}
        elif item.is_list:
            more["nargs"] = "+"
        elif flag.path == _SEQS:
            more |= {"nargs": "?", "const": _BARE_SEQS}
        default = "see above" if item.default is None else " ".join(flag.text_of(item.default))
        # argparse formats help with %.
        text = f"{item.help} (default: {'none' if item.default == () else default})"
        group.add_argument(flag.name, default=None, help=text.replace("%", "%%"), **more)
    parser.set_defaults(**{_GRANULARITY.dest: _GRANULARITY.setting.default})
    warmup = parser._option_string_actions.get(_WARMUP)
    if warmup is not None and type(warmup.default) is int:
        warmup.default = _MegatronDefault(warmup.default)


def read_flags(args: argparse.Namespace) -> GraphFlags | None:
    """Read the flags; return None for granularity ``layer``, which captures nothing.

    Args:
        args: The namespace from Megatron's parser, with the flags of `add_flags`.

    Raises:
        ConfigError: Flags have wrong values or no effect; the error lists all of them.
    """
    flag_values = {
        flag: flag.value_of(parsed)
        for flag in _OPTIONS.values()
        if (parsed := getattr(args, flag.dest)) is not None
    }
    if args.cuda_graph_granularity == "layer":
        flag_values.pop(_OPTIONS["pipeline.schedule"], None)  # it drives eager steps too
        if flag_values:
            unused = ", ".join(flag.format(value) for flag, value in flag_values.items())
            raise ConfigError(
                f"{unused} has no effect with {GRANULARITY} layer. Add {GRANULARITY} chunk, or "
                "leave it out."
            )
        return None
    problems: list[str] = []
    default = CaptureConfig().num_warmup_steps
    num_warmup_steps = getattr(args, "cuda_graph_warmup_steps", default)
    if isinstance(num_warmup_steps, _MegatronDefault):
        num_warmup_steps = default
    if num_warmup_steps < 1:
        problems.append(
            f"{_WARMUP} {num_warmup_steps}: chunks are captured from the inputs of "
            "an eager step, so at least one eager step must come first. Use 1 or more."
        )
    values: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    values["capture"]["num_warmup_steps"] = num_warmup_steps
    for flag, value in flag_values.items():
        switch = _OPTIONS.get(flag.setting.switch or "")
        if switch is not None and not flag_values.get(switch):
            problems.append(
                f"{flag.format(value)} has no effect without {switch.name}; add it, or leave this "
                "out."
            )
        section, _, name = flag.path.partition(".")
        values[section][name] = value
    sections: dict[str, Any] = {**values["moe"], **values["pipeline"]}
    kinds: dict[str, type[Section]] = {
        "capture": CaptureConfig,
        "packing": PackingConfig,
        "stash": StashConfig,
    }
    for section, kind in kinds.items():
        try:
            sections[section] = kind.model_validate(values[section])
        except ValidationError as error:
            problems += problems_of(error, kind, partial(_named, section))
    if problems:
        raise ConfigError("\n".join(problems))
    return GraphFlags(**sections)


def _named(section: str, path: str) -> str:
    """Return the path of a setting with the flag in place of its name."""
    return re.sub(r"^\w+", lambda match: flag_of(f"{section}.{match[0]}"), path)
