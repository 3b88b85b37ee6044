"""Declare a setting once; YAML, flags, help, documentation and schema follow from it.

A setting is a field of a section's dataclass, declared with `setting`. `settings_of` lists the
settings of a section and of the sections in it, with dotted paths.
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
        """Return the range as text that continues "it must be"."""
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
    """Declare a setting as a dataclass field.

    Args:
        default: the default; without one, the setting is required.
        help: the meaning, in sentences.
        bounds: the range of the number, or of each number of the list.
        flag: the flag that chunkgraph adds to a pretrain script, or None.
        megatron: the flag of Megatron's own command line, or None.
        needs: dotted path of the setting that must be on for this one to have an effect, or None.
        example: the value of a required setting in the generated reference.
    """
    declaration = _Declaration(help, bounds, flag, megatron, needs, example)
    return field(default=default, metadata={_KEY: declaration})


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting with its path.

    Attributes:
        path: dotted path, such as ``capture.scope``.
        hint: declared type.
        default: the default; `dataclasses.MISSING` for a required setting.
        help: see `setting`.
        bounds: see `setting`.
        flag: see `setting`.
        megatron: see `setting`.
        needs: see `setting`.
        example: see `setting`.
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
        """Return the last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def is_required(self) -> bool:
        """Return whether the setting has no default."""
        return self.default is MISSING

    @property
    def is_optional(self) -> bool:
        """Return whether null is a value."""
        return get_origin(self.hint) in {Union, types.UnionType}

    @property
    def value_hint(self) -> Any:
        """Return the type without null."""
        if not self.is_optional:
            return self.hint
        return next(arm for arm in get_args(self.hint) if arm is not type(None))

    @property
    def is_list(self) -> bool:
        """Return whether values are lists."""
        return get_origin(self.value_hint) is tuple

    @property
    def kind(self) -> type:
        """Return the type of a value, or of each value of a list."""
        if self.choices:
            return str
        kind: type = get_args(self.value_hint)[0] if self.is_list else self.value_hint
        return kind

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the possible words; empty for a number, a list or free text."""
        return get_args(self.value_hint) if get_origin(self.value_hint) is Literal else ()

    def out_of_bounds(self, value: object) -> Iterator[tuple[str, float]]:
        """Yield the numbers in a value that are out of bounds, each with its dotted path."""
        if self.bounds is ANY or isinstance(value, bool):
            return
        items = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for i, item in items:
            if isinstance(item, (int, float)) and item not in self.bounds:
                yield self.path if i is None else f"{self.path}[{i}]", item


def settings_of(section: type[Any], prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a section and of the sections in it, in order."""
    hints = get_type_hints(section)
    for item in fields(section):
        path = f"{prefix}{item.name}"
        if is_dataclass(hints[item.name]):
            yield from settings_of(hints[item.name], f"{path}.")
            continue
        declaration: _Declaration = item.metadata[_KEY]
        yield Setting(path=path, hint=hints[item.name], default=item.default, **vars(declaration))


def check_bounds(section: Any, prefix: str = "", kind: type[Any] | None = None) -> None:
    """Check the numbers and words of a section, or of a whole configuration.

    Args:
        section: the section.
        prefix: the beginning of its settings' paths.
        kind: the class that declares its settings; None: the section's class.

    Raises:
        ConfigError: a number is out of range, or a word is not one of the choices.
    """
    for item in settings_of(kind or type(section), prefix):
        value = section
        for name in item.path.removeprefix(prefix).split("."):
            value = getattr(value, name)
        if item.choices and value is not None and value not in item.choices:
            choices = ", ".join(map(repr, item.choices))
            raise ConfigError(f"{item.path} is {value!r}; it must be one of {choices}.")
        for path, number in item.out_of_bounds(value):
            raise ConfigError(f"{path} is {number}; it must be {item.bounds}.")
