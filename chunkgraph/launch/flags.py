"""The flags that `--cuda-graph-granularity chunk` adds to Megatron's command line.

Each stands for a setting of a configuration file and is derived from its declaration. No torch
here: the launcher looks at them before any process is started.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from chunkgraph.errors import ConfigError
from chunkgraph.settings import CaptureConfig, Config, PackingConfig, StashConfig, settings_of
from chunkgraph.settings.contexts import SIZE_RULES
from chunkgraph.settings.packing import NUM_SEQS_RULE
from chunkgraph.settings.renamed import successor
from chunkgraph.settings.rule import Facts
from chunkgraph.settings.setting import ANY, Setting
from chunkgraph.settings.words import FLAGS as FLAG_WORDS
from chunkgraph.settings.words import fact_of

if TYPE_CHECKING:
    from chunkgraph.engine import CaptureOptions

__all__ = [
    "FLAGS",
    "GRANULARITY",
    "ContextSizes",
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
    """One flag, and the setting that it stands for."""

    setting: Setting

    @property
    def path(self) -> str:
        """Dotted path of the setting."""
        return self.setting.path

    @property
    def name(self) -> str:
        """The flag on the command line."""
        assert self.setting.flag is not None
        return self.setting.flag

    @property
    def dest(self) -> str:
        """The name of the parsed argument."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes; none where it takes numbers."""
        return _SWITCHED if self.setting.kind is bool else self.setting.choices

    def text_of(self, value: Any) -> tuple[str, ...]:
        """Write a value of the setting as it stands after the flag."""
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

    def shown(self, parsed: Any) -> str:
        """Write the flag with a parsed argument, for messages."""
        values = parsed if isinstance(parsed, (list, tuple)) else [parsed]
        return " ".join(
            [self.name, *(f"{v:g}" if isinstance(v, float) else str(v) for v in values)]
        )

    def add_to(self, group: Any) -> None:
        """Add it to a group of Megatron's parser; None is the value where it is not given."""
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
"""Sequences of a packed microbatch where the flag is given without a number."""
_GRANULARITY = Flag(
    Setting(
        path="capture.enabled",
        hint=Literal["layer", "chunk"],
        default="layer",
        help="What one CUDA graph holds: what --cuda-graph-impl says, as without this flag "
        "(layer), or a whole model chunk, captured once per slot and replayed for any number of "
        "microbatches (chunk).",
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
"""All flags. That of the warmup is Megatron's own ``--cuda-graph-warmup-steps``."""


def flag_of(path: str) -> str:
    """Name the flag of a setting."""
    return _OPTIONS[path].name


class _MegatronDefault(int):
    """Megatron's own default for the warmup steps, as long as nobody gives a number."""


@dataclass(frozen=True)
class ContextSizes:
    """Context-parallel sizes of packed microbatches.

    Attributes:
        captured: sizes with graphs.
        eager: sizes without.
        schedule: which size a microbatch gets.
    """

    captured: tuple[int, ...]
    eager: tuple[int, ...] = ()
    schedule: Literal["smallest", "random"] = "smallest"

    @property
    def every(self) -> tuple[int, ...]:
        """All sizes that a microbatch may have, smallest first."""
        return tuple(sorted({*self.captured, *self.eager}))


@dataclass(frozen=True, kw_only=True)
class GraphFlags:
    """What the flags ask for when the granularity is ``chunk``.

    Attributes:
        capture: how chunks are captured.
        packing: packed sequences.
        token_drops: what is done about tokens that an expert has no room for.
        stash: of what experts save; None: no stash.
        schedule: of training steps.
    """

    capture: CaptureConfig = field(default_factory=CaptureConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    token_drops: Literal["warn", "count", "raise", "rerun"] = "warn"
    stash: StashConfig | None = None
    schedule: str = "auto"

    @property
    def contexts(self) -> ContextSizes | None:
        """Context-parallel sizes of packed microbatches; None: all have the model's."""
        sizes = self.packing.context_parallel_sizes
        if not sizes:
            return None
        captured = set(self.packing.captured_context_parallel_sizes or sizes)
        return ContextSizes(
            tuple(sorted(captured)),
            tuple(sorted(set(sizes) - captured)),
            self.packing.context_parallel_schedule,
        )

    def capture_options(self) -> CaptureOptions:
        """How the engine is to capture."""
        from chunkgraph.engine import CaptureOptions

        values = asdict(self.capture)
        del values["enabled"], values["scope"]
        return CaptureOptions(**values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values in the sections of a configuration file."""
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
        ConfigError: the parser has one of them already.
    """
    for flag in FLAGS:
        if flag.name in parser._option_string_actions:
            raise ConfigError(
                f"This Megatron has a flag {flag.name} of its own. chunkgraph adds the same to "
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
    """Read the flags, and list what is wrong in sentences.

    There are none with granularity ``layer``, which changes nothing. Wrong values are left out.

    Args:
        args: what Megatron's parser made, with the flags of `add_flags`.
    """
    given = {
        flag: parsed
        for flag in _OPTIONS.values()
        if (parsed := getattr(args, flag.dest)) is not None
    }
    if args.cuda_graph_granularity == "layer":
        if not given:
            return None, []
        idle = ", ".join(flag.shown(parsed) for flag, parsed in given.items())
        what = f"{idle} has no effect with {GRANULARITY} layer."
        return None, [f"{what} Add {GRANULARITY} chunk, or leave it out."]
    wrong: list[str] = []
    default = CaptureConfig().num_warmup_steps
    num_warmup_steps = getattr(args, "cuda_graph_warmup_steps", default)
    if isinstance(num_warmup_steps, _MegatronDefault):
        num_warmup_steps = default
    if num_warmup_steps < 1:
        wrong.append(
            f"{_WARMUP} {num_warmup_steps}: chunks are captured from the inputs of "
            "an eager step, so that at least one must come before. Give 1 or more."
        )
    values = _values(given, wrong)
    facts = {fact_of(path): value for path, value in values.items()}
    for rule in (NUM_SEQS_RULE, *SIZE_RULES):
        if text := rule.refusal(Facts(facts.get, FLAG_WORDS)):
            wrong.append(f"{text}.")
            del values[f"packing.{rule.settings[0]}"]
    capture = _section(CaptureConfig, "capture", values)
    return GraphFlags(
        capture=replace(capture, num_warmup_steps=max(num_warmup_steps, 1)),
        packing=_section(PackingConfig, "packing", values),
        token_drops=values.get("moe.token_drops", "warn"),
        stash=_section(StashConfig, "stash", values) if values.get("stash.enabled") else None,
        schedule=values.get("pipeline.schedule", "auto"),
    ), wrong


def _values(given: dict[Flag, Any], wrong: list[str]) -> dict[str, Any]:
    """Check the flags one by one, and return the values of those that are right by path."""
    values: dict[str, Any] = {}
    idle: dict[str, list[str]] = {}
    for flag, parsed in given.items():
        value, bounds = flag.value_of(parsed), flag.setting.bounds
        if flag.setting.needs in _OPTIONS and not _is_on(flag.setting.needs, given):
            idle.setdefault(flag.setting.needs, []).append(flag.shown(parsed))
        elif bounds is not ANY and any(n not in bounds for _, n in flag.setting.numbers(value)):
            each = "each number" if flag.setting.is_list else "it"
            wrong.append(f"{flag.shown(parsed)}: {each} must be {bounds}.")
        else:
            values[flag.path] = value
    for path, texts in idle.items():
        switch = _OPTIONS[path]
        on = " or ".join(word for word in switch.choices if word not in ("false", "none"))
        wrong.append(
            f"{', '.join(texts)} has no effect without {f'{switch.name} {on}'.rstrip()}; add it, "
            "or leave this out."
        )
    return values


def _is_on(path: str, given: dict[Flag, Any]) -> bool:
    """True where a switch asks for something, as do the switches that it needs itself."""
    switch = _OPTIONS[path]
    parsed = given.get(switch)
    return parsed is not None and switch.value_of(parsed) not in (switch.setting.default, ())


def _section(kind: type[Any], name: str, values: dict[str, Any]) -> Any:
    prefix = f"{name}."
    return kind(**{p.removeprefix(prefix): v for p, v in values.items() if p.startswith(prefix)})


def write_defaults(args: argparse.Namespace, flags: GraphFlags) -> None:
    """Write what flags mean into Megatron's arguments, which are saved: choices and warmup."""
    values = flags.as_dict()
    args.cuda_graph_warmup_steps = flags.capture.num_warmup_steps
    for flag in _OPTIONS.values():
        section, _, name = flag.path.partition(".")
        if flag.choices and section in ("capture", "moe"):
            setattr(args, flag.dest, flag.text_of(values[section][name])[0])


def forget_defaults(args: argparse.Namespace) -> None:
    """Leave an ordinary number in arguments that chunk graphs have nothing to do with."""
    if hasattr(args, "cuda_graph_warmup_steps"):
        args.cuda_graph_warmup_steps = int(args.cuda_graph_warmup_steps)


def check_flag_values(script_args: Sequence[str]) -> None:
    """Find a wrong value of one of the flags before a process is started.

    Raises:
        ConfigError: naming flags, values and choices.
    """
    every = {flag.name: flag.choices for flag in FLAGS if flag.choices}
    wrong: list[str] = []
    for i, arg in enumerate(script_args):
        name, equals, value = arg.partition("=")
        if replaced := successor(name):
            wrong.append(replaced)
        if name not in every:
            continue
        if not equals:
            value = (list(script_args[i + 1 :]) or [""])[0]
        if value not in every[name]:
            expected = f"expected one of {', '.join(every[name])}."
            wrong.append(f"{f'{name} {value}'.rstrip()}: {expected}")
    if wrong:
        raise ConfigError("\n".join(wrong))
