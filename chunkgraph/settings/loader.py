"""Read a `Config` from YAML and overrides, and write it; errors name the file and dotted path.

A file may name one base, ``extends: base.yaml``, relative to itself. It then holds only the
differences from the base, which may have a base too.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from chunkgraph._text import did_you_mean, name_list, shorten, shown
from chunkgraph.errors import ConfigError
from chunkgraph.settings.config import Config
from chunkgraph.settings.setting import settings_of
from chunkgraph.settings.yaml_text import parse_yaml, read_yaml

__all__ = [
    "Loaded",
    "config_from_mapping",
    "load_config",
    "load_with_origins",
    "to_mapping",
    "to_yaml",
]

_MAX_INT = 2**63 - 1
_MAX_TEXT = 4096
_BASE = "extends"


@dataclass(frozen=True)
class Loaded:
    """A configuration and where its values come from.

    Attributes:
        config: the configuration.
        origins: file name or ``override`` by dotted path; values without an entry are defaults.
    """

    config: Config
    origins: Mapping[str, str]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file.

    Args:
        path: a YAML file.
        overrides: ``section.key=value`` strings, applied in order. Values are YAML:
            ``train.num_microbatches=[4,6]`` is a list and ``run.debug=true`` a boolean.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a value has the wrong type, or
            values cannot go together (TopologyError if they cannot form a pipeline).
    """
    return load_with_origins(path, overrides).config


def load_with_origins(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a configuration file like `load_config`, and record where each value comes from."""
    raw: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, values in _read_files(Path(path)):
        _merge(raw, values)
        origins.update(dict.fromkeys(_leaves(values), source))
    for override in overrides:
        key, value = _parse_override(override)
        _apply_override(raw, override, key, value)
        origins = {path: at for path, at in origins.items() if not path.startswith(f"{key}.")}
        origins.update(dict.fromkeys(_leaves(value, key), "override"))
    return Loaded(config_from_mapping(raw, source=shorten(str(path))), origins)


def _read_files(path: Path, children: tuple[Path, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Read a file and its bases, the deepest base first; ``children`` are files that extend it."""
    source = shorten(str(path))
    try:
        raw = read_yaml(path)
    except ConfigError as error:
        if not children:
            raise
        msg = f"{shorten(str(children[-1]))}: cannot extend its base. {error}"
        raise ConfigError(msg) from None
    # Checked after reading: a loop of links cannot be resolved, but cannot be read either.
    if path.resolve() in [child.resolve() for child in children]:
        chain = " -> ".join(shorten(str(item)) for item in (*children, path))
        msg = f"{source} extends itself: {chain}. Remove one '{_BASE}'."
        raise ConfigError(msg)
    if not isinstance(raw, dict):
        msg = (
            f"{source}: expected sections such as 'model:' and 'train:', "
            f"got {_describe(raw)}. Start from a file in configs/."
        )
        raise ConfigError(msg)
    if _BASE not in raw:
        return [(source, raw)]
    base = raw.pop(_BASE)
    if not isinstance(base, str) or not base:
        msg = f"{source}: {_BASE}: expected the path of one file; got {_describe(base)}."
        raise ConfigError(msg)
    return [*_read_files(path.parent / base, (*children, path)), (source, raw)]


def _merge(raw: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Overwrite the base's values in place; sections are merged key by key."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(raw.get(key), dict):
            _merge(raw[key], value)
        else:
            raw[key] = dict(value) if isinstance(value, dict) else value


def _leaves(value: object, path: str = "") -> Iterator[str]:
    """Yield the dotted path of every single value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path


def config_from_mapping(raw: Mapping[str, object], *, source: str = "config") -> Config:
    """Build a Config from nested plain values; ``source`` names their origin in errors."""
    try:
        config = _build(Config, raw, "")
    except ConfigError as error:
        message = f"{source}: {error}"
        raise type(error)(message) from None
    assert isinstance(config, Config)
    return config


def to_mapping(config: Config) -> dict[str, Any]:
    """Return the configuration as nested plain values (lists, not tuples)."""
    mapping = _plain(config)
    assert isinstance(mapping, dict)
    return mapping


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML that `load_config` reads back to an equal value."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, default_flow_style=None)


def _parse_override(override: str) -> tuple[str, object]:
    """Split an override into a dotted path and a value of its type."""
    where = f"override {shown(override)}"
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        msg = f"{where}: expected section.key=value, such as train.lr=0.001."
        raise ConfigError(msg)
    value = parse_yaml(text, where)
    try:
        _convert(_type_at(key), value, key)
    except ConfigError as error:
        msg = f"{where}: {error}"
        raise type(error)(msg) from None
    return key, value


def _apply_override(raw: dict[str, Any], override: str, key: str, value: object) -> None:
    target = raw
    *sections, name = key.split(".")
    for section in sections:
        inner = target.setdefault(section, {})
        if not isinstance(inner, dict):
            msg = (
                f"override {shown(override)}: {section} is not a section in the file, but "
                f"{_describe(inner)}."
            )
            raise ConfigError(msg)
        target = inner
    target[name] = value


def _type_at(dotted: str) -> Any:
    """Return the declared type of the field at a dotted path."""
    hint: Any = Config
    parents: list[str] = []
    for part in dotted.split("."):
        if not is_dataclass(hint):
            msg = f"{'.'.join(parents)} is a single value and has no key {shown(part)}."
            raise ConfigError(msg)
        hints = get_type_hints(hint)
        if part not in hints:
            raise ConfigError(_unknown_key(part, ".".join(parents), hints))
        hint = hints[part]
        parents.append(part)
    return hint


def _build(cls: type[Any], raw: object, path: str) -> object:
    if not isinstance(raw, Mapping):
        msg = (
            f"{path}: expected a section with keys {name_list(_names(cls))}; got {_describe(raw)}."
        )
        raise ConfigError(msg)
    hints = get_type_hints(cls)
    for key in raw:
        if key not in hints:
            name = key if isinstance(key, str) else shown(key)
            raise ConfigError(_unknown_key(name, path, hints))
    values: dict[str, object] = {}
    for item in fields(cls):
        dotted = f"{path}.{item.name}" if path else item.name
        if item.name in raw:
            values[item.name] = _convert(hints[item.name], raw[item.name], dotted)
        elif item.default is MISSING and item.default_factory is MISSING:
            msg = f"{dotted} is missing and has no default; expected {_expected(hints[item.name])}."
            raise ConfigError(msg)
    section: object = cls(**values)
    return section


def _convert(hint: Any, value: Any, path: str) -> object:
    """Return ``value`` as the declared type; only numbers are widened, to float."""
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value, path)
    if get_origin(hint) in {Union, types.UnionType}:
        inner = [arm for arm in get_args(hint) if arm is not type(None)]
        return None if value is None else _convert(inner[0], value, path)
    if get_origin(hint) is Literal:
        if isinstance(value, str) and value in get_args(hint):
            return value
        suggestion = did_you_mean(value, get_args(hint)) if isinstance(value, str) else ""
        msg = f"{path}: expected {_expected(hint)}; got {_describe(value)}.{suggestion}"
        raise ConfigError(msg)
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        element = get_args(hint)[0]
        return tuple(_convert(element, item, f"{path}[{i}]") for i, item in enumerate(value))
    if hint is float:
        number = _as_float(value)
        if number is not None:
            return _bounded(number, path)
    elif type(value) is hint:  # exact type: True is not a whole number
        return _bounded(value, path)
    msg = f"{path}: expected {_expected(hint)}; got {_describe(value)}."
    raise ConfigError(msg)


def _as_float(value: object) -> float | None:
    """Return a number as float, or None; YAML 1.1 reads ``1e-3``, without a dot, as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _bounded(value: object, path: str) -> object:
    """Return a value, or raise for infinite or huge numbers, and for long text or NUL bytes."""
    problem = ""
    if isinstance(value, float) and not math.isfinite(value):
        problem = "it must be a finite number"
    elif isinstance(value, int) and abs(value) > _MAX_INT:
        problem = f"whole numbers end at {_MAX_INT}"
    elif isinstance(value, str) and len(value) > _MAX_TEXT:
        problem = f"text ends at {_MAX_TEXT} characters"
    elif isinstance(value, str) and "\0" in value:
        problem = "text must not have NUL characters"
    if problem:
        msg = f"{path} is {shown(value)}; {problem}."
        raise ConfigError(msg)
    return value


def _unknown_key(key: str, path: str, known: Mapping[str, object]) -> str:
    dotted = f"{path}.{key}" if path else key
    section = f"section {path!r}" if path else "the top level"
    hint = did_you_mean(key, known)
    if not hint:
        hint = did_you_mean(key, {item.name for item in settings_of(Config)} - set(known))
        for item in settings_of(Config):
            hint = hint.replace(f"'{item.name}'", f"'{item.path}'")
    return (
        f"{shorten(dotted)}: unknown key {shown(key)} in {section}.{hint} "
        f"Known keys: {name_list(known)}."
    )


def _names(cls: type[Any]) -> list[str]:
    return [item.name for item in fields(cls)]


def _expected(hint: Any) -> str:
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return f"a section with keys {name_list(_names(hint))}"
    if get_origin(hint) in {Union, types.UnionType}:
        inner = [arm for arm in get_args(hint) if arm is not type(None)]
        return f"{_expected(inner[0])} or null"
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        if get_args(hint)[0] is str:
            return "a list of names, such as [core_attn, mlp]"
        if get_args(hint)[0] is float:
            return "a list of numbers, such as [0.25, 0.5]"
        return "a list of whole numbers, such as [4, 6, 8]"
    return {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
    }[hint]


def _describe(value: object) -> str:
    kinds = {
        bool: "truth value",
        int: "whole number",
        float: "number",
        str: "text",
        list: "list",
        dict: "section",
    }
    if value is None:
        return "nothing (null)"
    return f"{shown(value)} ({kinds.get(type(value), type(value).__name__)})"


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
