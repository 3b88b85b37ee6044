"""The flags of the paged stash on Megatron's command line.

No torch here: the launcher looks at them before any process is started.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from chunkgraph.errors import ConfigError
from chunkgraph.settings import StashConfig, settings_of

__all__ = ["STASH", "StashFlag", "add_stash_flags", "given_stash_flags", "stash_from"]

_SWITCH = "--cuda-graph-stash"
_SWITCHED = ("no", "yes")


@dataclass(frozen=True)
class StashFlag:
    """A flag for one field of the section ``stash``.

    Attributes:
        field: of `StashConfig`.
        help: what it means.
        kind: of its number.
        choices: of its word; none where it takes a number.
    """

    field: str
    help: str
    kind: type = int
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As on the command line."""
        return _SWITCH if self.field == "enabled" else f"{_SWITCH}-{self.field.replace('_', '-')}"

    @property
    def dest(self) -> str:
        """As in the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")

    def value_of(self, given: Any) -> Any:
        """Of the field, as the parsed argument gives it."""
        return given == "yes" if given is not None and self.choices == _SWITCHED else given

    def text_of(self, value: Any) -> str:
        """What stands for a value of the field on the command line."""
        if self.choices == _SWITCHED:
            return "yes" if value else "no"
        return repr(value) if isinstance(value, float) else str(value)


STASH = (
    StashFlag(
        "enabled",
        "yes: what experts save for the backward goes to pages, only rows that hold a token "
        "(default: no).",
        choices=_SWITCHED,
    ),
    StashFlag("page_bytes", "Bytes of a page, a multiple of 16 (default: 65536)."),
    StashFlag(
        "headroom",
        "Pages taken, as a multiple of what eager steps showed to be needed (default: 1.1).",
        kind=float,
    ),
    StashFlag("initial_bytes", "Bytes of the pages at first (default: as the eager steps show)."),
    StashFlag("max_bytes", "The most that they may grow to (default: no limit)."),
    StashFlag("spill_bytes", "Bytes of pages in the host's memory (default: 0)."),
    StashFlag(
        "max_recaptures",
        "How many times graphs are captured anew with more pages (default: 2).",
    ),
    StashFlag(
        "on_overflow",
        "After a step in which pages ran out: run it anew eagerly, or an error (default: rerun).",
        choices=("rerun", "raise"),
    ),
    StashFlag(
        "prefetches",
        "yes: a backward reloads a layer's rows beside, while the layer after it runs "
        "(default: no).",
        choices=_SWITCHED,
    ),
    StashFlag(
        "skips_single_slots",
        "yes: chunks whose backwards follow their forwards at once do not stash (default: no).",
        choices=_SWITCHED,
    ),
)
"""All of them, the switch first."""


def add_stash_flags(group: Any) -> None:
    """Add them to a group of Megatron's parser; None where one is not given."""
    for flag in STASH:
        if flag.choices:
            group.add_argument(flag.name, choices=flag.choices, default=None, help=flag.help)
        else:
            group.add_argument(flag.name, type=flag.kind, default=None, metavar="N", help=flag.help)


def given_stash_flags(args: argparse.Namespace) -> list[str]:
    """Those that were given, as they stand on the command line."""
    given = {flag.name: getattr(args, flag.dest) for flag in STASH}
    return [f"{name} {value}" for name, value in given.items() if value is not None]


def stash_from(args: argparse.Namespace) -> StashConfig | None:
    """What they ask for; None: no stash.

    Raises:
        ConfigError: a value is out of range, or has no effect.
    """
    switch, *others = STASH
    values = {flag.field: flag.value_of(getattr(args, flag.dest)) for flag in others}
    values = {field: value for field, value in values.items() if value is not None}
    if getattr(args, switch.dest) != "yes":
        if values:
            given = [text for text in given_stash_flags(args) if not text.startswith(f"{_SWITCH} ")]
            raise ConfigError(
                f"{', '.join(given)} has no effect without {_SWITCH} yes; add it, or leave this "
                "out."
            )
        return None
    stash = StashConfig(enabled=True, **values)
    for declared in settings_of(StashConfig):
        value = getattr(stash, declared.name)
        if any(number not in declared.bounds for _, number in declared.numbers(value)):
            raise ConfigError(f"{declared.flag} {value}: it must be {declared.bounds}.")
    return stash
