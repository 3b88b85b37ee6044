"""The declaration of a setting, from which YAML, flags, help, documentation and schema follow.

A setting is a field of a section's dataclass, declared with `setting`. `settings_of` lists the
settings of a section, or of everything below one, with dotted paths.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from chunkgraph.errors import ConfigError

__all__ = [
    "ANY",
    "NOT_NEGATIVE",
    "POSITIVE",
    "Bounds",
    "Setting",
    "check_bounds",
    "setting",
    "settings_of",
]

_KEY = "chunkgraph.setting"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The range of a number, or of each number of a list."""

    minimum: float = -math.inf
    above: float = -math.inf
    maximum: float = math.inf
    below: float = math.inf
    multiple_of: int = 1

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and self.minimum <= value <= self.maximum
            and self.above < value < self.below
            and (self.multiple_of == 1 or value % self.multiple_of == 0)
        )

    def __str__(self) -> str:
        """Describe the range as it follows "it must be"."""
        parts = []
        if self.multiple_of > 1:
            parts.append(f"a multiple of {self.multiple_of}")
        elif self.minimum > -math.inf:
            parts.append(f"{self.minimum:.15g} or greater")
        if self.above > -math.inf:
            parts.append(f"greater than {self.above:.15g}")
        if self.maximum < math.inf:
            parts.append(f"at most {self.maximum:.15g}")
        if self.below < math.inf:
            parts.append(f"less than {self.below:.15g}")
        return " and ".join(parts)


ANY = Bounds()
POSITIVE = Bounds(above=0)
NOT_NEGATIVE = Bounds(minimum=0)


@dataclass(frozen=True)
class _Declaration:
    help: str
    bounds: Bounds
    flag: str | None
    megatron: str | None
    needs: str | None
    example: object


def setting(
    default: Any = MISSING,
    *,
    help: str,  # noqa: A002  as argparse calls it
    bounds: Bounds = ANY,
    flag: str | None = None,
    megatron: str | None = None,
    needs: str | None = None,
    example: object = None,
) -> Any:
    """Declare a setting: a dataclass field that knows everything about itself.

    Args:
        default: Its value where none is given; without one the setting is required.
        help: What it means, in sentences.
        bounds: The range of its number, or of each number of its list.
        flag: The flag that chunkgraph adds to a pretrain script for it.
        megatron: The flag that Megatron's own command line has for it.
        needs: Dotted path of the setting that must be on for this one to have an effect.
        example: The value of a required setting in the generated reference.
    """
    declaration = _Declaration(help, bounds, flag, megatron, needs, example)
    return field(default=default, metadata={_KEY: declaration})


@dataclass(frozen=True)
class Setting:
    """A declared setting and its place.

    Attributes:
        path: Dotted path, such as ``capture.scope``.
        hint: Declared type.
        default: Its value where none is given; `dataclasses.MISSING` if it is required.
        help: What it means.
        bounds: The range of its number, or of each number of its list.
        flag: The flag that chunkgraph adds to a pretrain script, or None.
        megatron: Megatron's own flag, or None.
        needs: Path of the setting that must be on for this one to have an effect, or None.
        example: The value of a required setting in the generated reference.
    """

    path: str
    hint: Any
    default: object
    help: str
    bounds: Bounds
    flag: str | None
    megatron: str | None
    needs: str | None
    example: object

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def is_required(self) -> bool:
        """True where it has no default."""
        return self.default is MISSING

    @property
    def is_optional(self) -> bool:
        """True where null is a value."""
        return get_origin(self.hint) in {Union, types.UnionType}

    @property
    def value_hint(self) -> Any:
        """The type without null."""
        if not self.is_optional:
            return self.hint
        return next(arm for arm in get_args(self.hint) if arm is not type(None))

    @property
    def is_list(self) -> bool:
        """True where a value is a list."""
        return get_origin(self.value_hint) is tuple

    @property
    def kind(self) -> type:
        """The type of a value, or of each value of a list."""
        if self.choices:
            return str
        kind: type = get_args(self.value_hint)[0] if self.is_list else self.value_hint
        return kind

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes; none where it is a number, a list or free text."""
        return get_args(self.value_hint) if get_origin(self.value_hint) is Literal else ()

    def numbers(self, value: object) -> Iterator[tuple[str, float]]:
        """Yield the numbers in a value, each with its dotted path."""
        if isinstance(value, tuple):
            for i, item in enumerate(value):
                if isinstance(item, (int, float)):
                    yield f"{self.path}[{i}]", item
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield self.path, value


def settings_of(section: type[Any], prefix: str = "") -> Iterator[Setting]:
    """List the settings of a section and of the sections in it, in their order."""
    hints = get_type_hints(section)
    for item in fields(section):
        path = f"{prefix}{item.name}"
        if is_dataclass(hints[item.name]):
            yield from settings_of(hints[item.name], f"{path}.")
            continue
        declared: _Declaration = item.metadata[_KEY]
        yield Setting(
            path=path,
            hint=hints[item.name],
            default=item.default,
            help=declared.help,
            bounds=declared.bounds,
            flag=declared.flag,
            megatron=declared.megatron,
            needs=declared.needs,
            example=declared.example,
        )


def check_bounds(section: Any, prefix: str = "", kind: type[Any] | None = None) -> None:
    """Check every number of a section, or of a whole configuration, against its bounds.

    Args:
        section: The section.
        prefix: Of its settings' paths.
        kind: The class that declares its settings; default its own.

    Raises:
        ConfigError: A number is out of range, or a word is not one of the choices.
    """
    for declared in settings_of(kind or type(section), prefix):
        value = section
        for name in declared.path.removeprefix(prefix).split("."):
            value = getattr(value, name)
        if declared.choices and value is not None and value not in declared.choices:
            choices = ", ".join(map(repr, declared.choices))
            raise ConfigError(f"{declared.path} is {value!r}; it must be one of {choices}.")
        for path, number in declared.numbers(value):
            if declared.bounds is not ANY and number not in declared.bounds:
                raise ConfigError(f"{path} is {number}; it must be {declared.bounds}.")
