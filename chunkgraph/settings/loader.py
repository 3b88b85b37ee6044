"""Read a `Config` from YAML and overrides, and write it; errors name the file and dotted path.

A file may name one base, ``extends: base.yaml``, relative to itself. It then holds only the
differences from the base, which may have a base too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator

from chunkgraph._inputs import read_input
from chunkgraph._text import did_you_mean, shorten, shown
from chunkgraph.errors import ConfigError
from chunkgraph.settings.listing import settings_of
from chunkgraph.settings.models import Section, Settings
from chunkgraph.settings.rules import check_settings

_BASE = "extends"
_MAX_BYTES = 64 * 1024
_MAX_PROBLEMS = 20
_EXPECTED = {
    "a valid boolean": "true or false",
    "a valid dictionary": "a section",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid tuple": "a list",
}
"""Pydantic's words for types, and those of YAML."""


class Config(Settings):
    """All settings of a run, checked against each other."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_settings(self)
        return self

    def replace(self, **changes: Any) -> Config:
        """Return a checked copy: ``config.replace(device="cpu", moe={"token_drops": "count"})``.

        Raises:
            ConfigError: A value is wrong, or two values conflict.
        """
        values = self.model_dump()
        for name, value in changes.items():
            values[name] = {**values[name], **value} if isinstance(value, dict) else value
        return config_from_mapping(values)


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys and reads ``1e-3`` as a number, as YAML 1.2."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"the key {shown(key.value)} is written twice"
                raise yaml.constructor.ConstructorError(
                    problem=problem, problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d.]*[eE][-+]?\d+$"), list("-+0123456789")
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file.

    Args:
        path: A YAML file of at most 64 KiB.
        overrides: ``section.key=value`` strings, applied in order. Values are YAML:
            ``train.num_microbatches=[4,6]`` is a list and ``model.swiglu=true`` a boolean.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, a value has the wrong type, or
            values conflict (TopologyError if they cannot form a pipeline).
    """
    raw = _read_files(Path(path))
    for override in overrides:
        key, equals, text = override.partition("=")
        where = f"override {shown(override)}"
        if not equals or not key.strip():
            raise ConfigError(f"{where}: expected section.key=value, such as train.lr=0.001.")
        value = _parse(text, where)
        *sections, name = key.strip().split(".")
        for section in reversed(sections):
            value, name = {name: value}, section
        _merge(raw, {name: value})
    return config_from_mapping(raw, source=shorten(str(path)))


def _read_files(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the values of a file and its bases; ``children`` are files that extend it."""
    source = shorten(str(path))
    advice = "Pass a YAML file, such as those in configs/."
    try:
        content = read_input(path, "the configuration file", advice, _MAX_BYTES)
    except ConfigError as error:
        base = f"{shorten(str(children[-1]))}: cannot extend its base. " if children else ""
        raise ConfigError(f"{base}{error}") from None
    if path.resolve() in [child.resolve() for child in children]:
        chain = " -> ".join(shorten(str(item)) for item in (*children, path))
        raise ConfigError(f"{source} extends itself: {chain}. Remove one '{_BASE}'.")
    raw = _parse(content, source)
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{source}: expected sections such as 'model:' and 'train:', got {shown(raw)}. Start "
            "from a file in configs/."
        )
    if _BASE not in raw:
        return raw
    base = raw.pop(_BASE)
    if not isinstance(base, str):
        raise ConfigError(f"{source}: {_BASE} is {shown(base)}; it must be the path of one file.")
    values = _read_files(path.parent / base, (*children, path))
    _merge(values, raw)
    return values


def _parse(text: str | bytes, where: str) -> Any:
    """Read the values of YAML text; ``where`` is its origin, for errors."""
    try:
        return yaml.load(text, Loader=_Loader)
    except Exception as error:  # noqa: BLE001 - tagged values raise errors of many kinds
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        what = shorten(" ".join(str(problem).split()))
        raise ConfigError(f"{where}{place}: not valid YAML: {what}.") from None


def _merge(raw: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Overwrite values in place; sections are merged key by key."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(raw.get(key), dict):
            _merge(raw[key], value)
        else:
            raw[key] = value


def config_from_mapping(raw: Mapping[str, object], *, source: str = "config") -> Config:
    """Build a Config from nested plain values; ``source`` names their origin in errors.

    Raises:
        ConfigError: See `load_config`. The message has a line for each wrong value.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        kinds = [type(e["ctx"]["error"]) for e in error.errors() if e["type"] == "value_error"]
        kind = kinds[0] if kinds else ConfigError
        lines = problems_of(error, Config)
        start = f"{source}: " if len(lines) == 1 else f"{source}:\n  - "
        raise kind(start + "\n  - ".join(lines)) from None


def problems_of(
    error: ValidationError, model: type[Section], name: Callable[[str], str] = str
) -> list[str]:
    """Return a line for each problem: path, value, what it must be, and the nearest match.

    Args:
        error: Pydantic's error.
        model: The model whose validation failed.
        name: Returns the text for the dotted path of a setting.
    """
    lines = []
    for item in error.errors(include_url=False)[:_MAX_PROBLEMS]:
        *parents, last = item["loc"] or ("",)
        path = re.sub(r"\.(\d+)\b", r"[\1]", ".".join(map(str, item["loc"])))
        found = f"{name(path)} is {shown(item['input'])}"
        if item["type"] == "value_error":
            line = str(item["ctx"]["error"])
        elif item["type"] in ("extra_forbidden", "invalid_key"):
            line = _unknown_key(str(last), ".".join(map(str, parents)), model)
        elif item["type"] == "missing":
            line = f"{name(path)} is missing and has no default."
        elif item["type"] == "model_type":
            keys = ", ".join(sorted(_keys_of(model, path)))
            line = f"{found}; it must be a section with keys {keys}."
        else:
            expected = re.sub(r"^\w+ should ", "it must ", item["msg"]).split(" after ")[0]
            for word, plain in _EXPECTED.items():
                expected = expected.replace(word, plain)
            line = f"{found}; {expected}."
        if item["type"] == "literal_error":
            choices = re.findall(r"'(.*?)'", item["ctx"]["expected"])
            line += did_you_mean(str(item["input"]), choices)
        lines.append(line)
    if (num_more := error.error_count() - _MAX_PROBLEMS) > 0:
        lines.append(f"... and {num_more} more")
    return lines


def _keys_of(model: type[Section], path: str) -> list[str]:
    """Return the keys of a section; of the whole model for an empty path."""
    prefix = f"{path}." if path else ""
    inside = [p.removeprefix(prefix) for p in _paths_of(model) if p.startswith(prefix)]
    return list(dict.fromkeys(key.partition(".")[0] for key in inside))


def _paths_of(model: type[Section]) -> list[str]:
    return [item.path for item in settings_of(model)]


def _unknown_key(key: str, section: str, model: type[Section]) -> str:
    known, paths = _keys_of(model, section), _paths_of(model)
    hint = did_you_mean(key, known)
    if not hint:
        hint = did_you_mean(key, [path.rpartition(".")[2] for path in paths], cutoff=0.9)
        for path in paths:
            hint = hint.replace(f"'{path.rpartition('.')[2]}'", f"'{path}'")
    where = f"section {section!r}" if section else "the top level"
    dotted = f"{section}.{key}" if section else key
    if section in ("model", "moe"):
        hint += " A field of Megatron's TransformerConfig belongs in model.transformer_config."
    return (
        f"{shorten(dotted)}: unknown key {shown(key)} in {where}.{hint} Known keys: "
        f"{', '.join(sorted(known))}."
    )


def to_mapping(config: Config) -> dict[str, Any]:
    """Return the configuration as nested plain values (lists, not tuples)."""
    return config.model_dump(mode="json")


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML that `load_config` reads back to an equal value."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, default_flow_style=None)
