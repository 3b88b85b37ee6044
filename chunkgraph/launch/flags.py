"""The flags that `--cuda-graph-granularity chunk` adds to Megatron's command line.

Each flag stands for a setting of a configuration file and is derived from its declaration. This
module does not import torch: the launcher checks flags before it starts any process.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from chunkgraph.errors import ConfigError
from chunkgraph.settings import CaptureConfig, Config, PackingConfig, StashConfig, settings_of
from chunkgraph.settings.contexts import SIZE_RULES
from chunkgraph.settings.packing import NUM_SEQS_RULE
from chunkgraph.settings.rule import Facts
from chunkgraph.settings.setting import ANY, Setting
from chunkgraph.settings.words import FLAGS as FLAG_WORDS

if TYPE_CHECKING:
    from chunkgraph.engine import CaptureOptions

__all__ = [
    "FLAGS",
    "GRANULARITY",
    "Flag",
    "GraphFlags",
    "add_flags",
    "check_flag_values",
    "flag_of",
    "forget_defaults",
    "read_flags",
    "write_defaults",
]

_GROUP = "chunk-wise CUDA graphs"
_SWITCHED = ("false", "true")
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
        """Return the words that the flag accepts; empty if it accepts numbers."""
        return _SWITCHED if self.setting.kind is bool else self.setting.choices

    def text_of(self, value: Any) -> tuple[str, ...]:
        """Format a value of the setting as the flag's arguments."""
        if isinstance(value, bool):
            return (_SWITCHED[value],)
        if isinstance(value, tuple):
            return tuple(map(_text, value or (0,)))
        return (_text(value),)

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

    def add_to(self, group: Any) -> None:
        """Add the flag to a group of Megatron's parser, with default None."""
        more: dict[str, Any] = {"type": self.setting.kind, "metavar": "N"}
        if self.choices:
            more = {"choices": self.choices}
        elif self.setting.is_list:
            more["nargs"] = "+"
        elif self.path == _SEQS:
            more |= {"nargs": "?", "const": _BARE_SEQS}
        elif self.setting.kind is str:
            more["metavar"] = "NAME"
        # argparse formats help with %.
        text = f"{self.setting.help} (default: {self._default()})".replace("%", "%%")
        group.add_argument(self.name, default=None, help=text, **more)

    def _default(self) -> str:
        default = self.setting.default
        if default is None or default == ():
            return "see above" if default is None else "none"
        return " ".join(self.text_of(default))


def _text(value: Any) -> str:
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


_BARE_SEQS = 50
"""Sequences of a packed microbatch if the flag is used without a number."""
_GRANULARITY = Flag(
    Setting(
        path="capture.enabled",
        hint=Literal["layer", "chunk"],
        default="layer",
        help="What one CUDA graph holds: the part that --cuda-graph-impl selects, as without this "
        "flag (layer), or a whole model chunk, captured once per slot and replayed for any number "
        "of microbatches (chunk).",
        bounds=ANY,
        flag="--cuda-graph-granularity",
        megatron=None,
        needs=None,
        example=None,
    )
)
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
        stash: Settings of the stash for activations of experts; None without a stash.
        schedule: Schedule of training steps.
        turned_off: Lines about Megatron's flags that training runs without.
    """

    capture: CaptureConfig = field(default_factory=CaptureConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    token_drops: Literal["warn", "count", "raise", "rerun"] = "warn"
    stash: StashConfig | None = None
    schedule: str = "auto"
    turned_off: tuple[str, ...] = ()

    def capture_options(self) -> CaptureOptions:
        """Return the capture options for the engine."""
        from chunkgraph.engine import CaptureOptions

        values = asdict(self.capture)
        del values["enabled"], values["scope"]
        return CaptureOptions(**values)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values in the sections of a configuration file."""
        return {
            "pipeline": {"schedule": self.schedule},
            "capture": asdict(self.capture),
            "packing": asdict(self.packing),
            "moe": {"token_drops": self.token_drops},
            "stash": asdict(self.stash or StashConfig()),
        }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to Megatron's parser.

    Raises:
        ConfigError: The parser already has one of the flags.
    """
    for flag in FLAGS:
        if flag.name in parser._option_string_actions:
            raise ConfigError(
                f"This Megatron already has a flag {flag.name}. chunkgraph adds the flag only to "
                "Megatron releases without it; start the script without chunkgraph, or use "
                "megatron-core 0.16 to 0.19."
            )
    group = parser.add_argument_group(_GROUP)
    for flag in FLAGS:
        flag.add_to(group)
    parser.set_defaults(**{_GRANULARITY.dest: _GRANULARITY.setting.default})
    warmup = parser._option_string_actions.get(_WARMUP)
    if warmup is not None and type(warmup.default) is int:
        warmup.default = _MegatronDefault(warmup.default)


def read_flags(args: argparse.Namespace) -> tuple[GraphFlags | None, list[str]]:
    """Read the flags; return them and a list of errors as sentences.

    With granularity ``layer``, which captures nothing, the flags are None. The result omits wrong
    values.

    Args:
        args: The namespace from Megatron's parser, with the flags of `add_flags`.
    """
    flag_values = {
        flag: flag.value_of(parsed)
        for flag in _OPTIONS.values()
        if (parsed := getattr(args, flag.dest)) is not None
    }
    if args.cuda_graph_granularity == "layer":
        flag_values.pop(_OPTIONS["pipeline.schedule"], None)  # it drives eager steps too
        if not flag_values:
            return None, []
        unused = ", ".join(flag.format(value) for flag, value in flag_values.items())
        problem = f"{unused} has no effect with {GRANULARITY} layer."
        return None, [f"{problem} Add {GRANULARITY} chunk, or leave it out."]
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
    idle: defaultdict[Flag, list[str]] = defaultdict(list)
    for flag, value in flag_values.items():
        setting, switch = flag.setting, _OPTIONS.get(flag.setting.needs or "")
        if switch is not None and flag_values.get(switch) in (None, switch.setting.default, ()):
            idle[switch].append(flag.format(value))
        elif any(setting.out_of_bounds(value)):
            each = "each number" if setting.is_list else "it"
            problems.append(f"{flag.format(value)}: {each} must be {setting.bounds}.")
        else:
            section, _, name = setting.path.partition(".")
            values[section][name] = value
    for switch, texts in idle.items():
        on = " or ".join(word for word in switch.choices if word not in ("false", "none"))
        problems.append(
            f"{', '.join(texts)} has no effect without {f'{switch.name} {on}'.rstrip()}; add it, "
            "or leave this out."
        )
    packing = values["packing"]
    for rule in (NUM_SEQS_RULE, *SIZE_RULES):
        if text := rule.refusal(Facts(packing.get, FLAG_WORDS)):
            problems.append(f"{text}.")
            del packing[rule.settings[0]]
    return GraphFlags(
        capture=CaptureConfig(num_warmup_steps=max(num_warmup_steps, 1), **values["capture"]),
        packing=PackingConfig(**packing),
        stash=StashConfig(**values["stash"]) if values["stash"].get("enabled") else None,
        **values["moe"],
        **values["pipeline"],
    ), problems


def write_defaults(args: argparse.Namespace, flags: GraphFlags) -> None:
    """Write resolved choices and warmup steps into Megatron's arguments, which are saved."""
    values = flags.as_dict()
    args.cuda_graph_warmup_steps = flags.capture.num_warmup_steps
    for flag in _OPTIONS.values():
        section, _, name = flag.path.partition(".")
        if flag.choices and section in ("capture", "moe"):
            setattr(args, flag.dest, flag.text_of(values[section][name])[0])


def forget_defaults(args: argparse.Namespace) -> None:
    """Replace the marked warmup default with a plain number if chunk graphs are off."""
    if hasattr(args, "cuda_graph_warmup_steps"):
        args.cuda_graph_warmup_steps = int(args.cuda_graph_warmup_steps)


def check_flag_values(script_args: Sequence[str]) -> None:
    """Check the values of flags with choices before a process is started.

    Raises:
        ConfigError: A value is not a choice of its flag.
    """
    choices = {flag.name: flag.choices for flag in FLAGS if flag.choices}
    problems: list[str] = []
    for i, arg in enumerate(script_args):
        name, equals, value = arg.partition("=")
        if name not in choices:
            continue
        if not equals:
            value = (list(script_args[i + 1 :]) or [""])[0]
        if value not in choices[name]:
            expected = f"expected one of {', '.join(choices[name])}."
            problems.append(f"{f'{name} {value}'.rstrip()}: {expected}")
    if problems:
        raise ConfigError("\n".join(problems))
