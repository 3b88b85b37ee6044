"""Write settings as text: the generated reference file, and a configuration with its origins."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import yaml

from chunkgraph._text import REPORT_WIDTH
from chunkgraph.settings.config import Config
from chunkgraph.settings.loader import Loaded
from chunkgraph.settings.resolved import resolved
from chunkgraph.settings.setting import ANY, NOT_NEGATIVE, POSITIVE, Setting, settings_of

__all__ = ["config_yaml", "differences", "grouped", "reference_yaml"]

_HEADER = """\
# Every setting with its default, as `chunkgraph config` prints it.
#
# A configuration holds only what differs from these values. Settings without a
# default have an example here.
"""


def grouped() -> list[tuple[str, str, list[Setting]]]:
    """Return (name, description, settings) of each section; settings of no section come first."""
    hints = get_type_hints(Config)
    all_items = list(settings_of(Config))
    groups = [("", "", [item for item in all_items if "." not in item.path])]
    for item in fields(Config):
        section = hints[item.name]
        if is_dataclass(section):
            about = (section.__doc__ or "").splitlines()[0].replace("``", "")
            items = [one for one in all_items if one.path.startswith(f"{item.name}.")]
            groups.append((item.name, about, items))
    return groups


def reference_yaml() -> str:
    """Return a valid configuration with every setting, its help and its default."""

    def lines_of(item: Setting, indent: str) -> Iterator[str]:
        yield from _comment(_help(item), indent)
        yield from _entry(item.name, item.example if item.is_required else item.default, indent)

    return f"{_HEADER}\n{_document(lines_of, has_help=True)}"


def config_yaml(loaded: Loaded) -> str:
    """Return the resolved configuration, each setting with its help and its origin."""
    config = resolved(loaded.config)

    def lines_of(item: Setting, indent: str) -> Iterator[str]:
        value = _value_at(config, item.path)
        origin = loaded.origins.get(item.path, "default")
        if value != _value_at(loaded.config, item.path):
            origin = "derived from other settings"
        yield from _comment(_help(item), indent)
        yield from _entry(item.name, value, indent, origin)

    return _document(lines_of, has_help=True)


def differences(loaded: Loaded) -> str:
    """Return only the settings that differ from their defaults: the shortest equivalent file."""

    def lines_of(item: Setting, indent: str) -> Iterator[str]:
        value = _value_at(loaded.config, item.path)
        if value != item.default:
            yield from _entry(item.name, value, indent, loaded.origins[item.path])

    return _document(lines_of, has_help=False)


def _document(lines_of: Callable[[Setting, str], Iterable[str]], *, has_help: bool) -> str:
    blocks = []
    for section, about, settings in grouped():
        lines = [line for item in settings for line in lines_of(item, "  " if section else "")]
        if lines and section:
            lines = [*(_comment(about, "") if has_help else ()), f"{section}:", *lines]
        if lines:
            blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _help(item: Setting) -> str:
    if item.choices:
        choices = [*item.choices, *(["null"] if item.is_optional else [])]
        return f"{item.help} One of {', '.join(choices)}."
    if item.bounds in (ANY, POSITIVE, NOT_NEGATIVE):
        return item.help
    return f"{item.help} Must be {item.bounds}."


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(
        text,
        REPORT_WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _entry(name: str, value: Any, indent: str, origin: str = "") -> list[str]:
    """Return the lines of a key and its value, with the origin after it or, if too long, above."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(
        {name: plain},
        default_flow_style=None if isinstance(plain, list) else False,
        width=REPORT_WIDTH - len(indent) - 2,
    )
    lines = [f"{indent}{line}" for line in text.splitlines()]
    if not origin:
        return lines
    if len(lines) == 1 and len(lines[0]) + len(origin) + 4 <= REPORT_WIDTH:
        return [f"{lines[0]}  # {origin}"]
    return [*_comment(origin, indent), *lines]


def _value_at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
