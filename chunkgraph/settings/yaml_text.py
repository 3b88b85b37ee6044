"""Read plain values from YAML: small files, no Python tags, and errors with line and column."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import yaml

from chunkgraph._text import shorten, shown
from chunkgraph.errors import ConfigError

__all__ = ["parse_yaml", "read_yaml"]

# PyYAML reads the largest accepted file in about a second.
_MAX_BYTES = 256 * 1024
_MAX_VALUES = 20_000
_MAX_DEPTH = 32
_MAX_NUMBER_LENGTH = 400
_PIPE_TIMEOUT_S = 2.0

_TAG = "tag:yaml.org,2002:"
_TAGS = {
    yaml.MappingNode: {"map"},
    yaml.SequenceNode: {"seq"},
    yaml.ScalarNode: {"null", "bool", "int", "float", "str", "merge"},
}


def read_yaml(path: str | Path) -> object:
    """Read the values of a file, or of a pipe such as ``/dev/stdin``.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not valid YAML.
    """
    where = shorten(str(path)) or "''"
    try:
        content = _read_bounded(path)
    except (OSError, ValueError) as error:
        msg = (
            f"{where}: cannot read the configuration file: {_reason(error)}. Pass a YAML file, "
            "such as those in configs/."
        )
        raise ConfigError(msg) from None
    if len(content) > _MAX_BYTES:
        msg = f"{where}: larger than {_MAX_BYTES} bytes, the limit of a configuration."
        raise ConfigError(msg)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        msg = (
            f"{where}, line {line}: the configuration file is not UTF-8 text (byte {error.start}). "
            "Save it as UTF-8."
        )
        raise ConfigError(msg) from None
    return parse_yaml(text, where)


def parse_yaml(text: str, where: str) -> object:
    """Read the values of a text.

    Args:
        text: the YAML.
        where: the text's origin, for errors.

    Raises:
        ConfigError: the text is not valid YAML, or is nested too deeply or too large after
            expanding aliases.
    """
    try:
        if len(text) > _MAX_BYTES:
            msg = f"longer than {_MAX_BYTES} characters, the limit of a configuration"
            raise _Refused(problem=msg)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or str(error)
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        if not isinstance(error, _Refused):
            problem = f"not valid YAML: {shorten(problem)}"
        msg = f"{where}{place}: {problem}."
        raise ConfigError(msg) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"#x{error.character:04x}"
        msg = f"{where}, line {line}: not valid YAML: contains the character {character}."
        raise ConfigError(msg) from None


def _read_bounded(path: str | Path) -> bytes:
    """Read at most a little more than the allowed size, and wait for a pipe only briefly."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        content = b""
        while len(content) <= _MAX_BYTES:
            if not select.select([descriptor], [], [], _PIPE_TIMEOUT_S)[0]:
                msg = f"nothing arrives in {_PIPE_TIMEOUT_S:g} seconds"
                raise OSError(msg)
            part = os.read(descriptor, _MAX_BYTES)
            if not part:
                break
            content += part
        return content
    finally:
        os.close(descriptor)


def _reason(error: OSError | ValueError) -> str:
    return (getattr(error, "strerror", None) or str(error)).rstrip(".")


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that a configuration must not have."""


class _Loader(yaml.SafeLoader):
    """A safe loader of plain values with bounded work.

    Keys and dates are text, and duplicate keys are refused. Aliases count as their contents.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._num_values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        num_before = self._num_values
        self._depth += 1
        self._num_values += 1
        self._refuse_if(self._depth > _MAX_DEPTH, f"nested deeper than {_MAX_DEPTH} levels", event)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            is_complete = id(node) in self._sizes
            self._refuse_if(not is_complete, f"*{event.anchor} contains itself", event)
            self._num_values += self._sizes[id(node)] - 1
        self._refuse_if(
            self._num_values > _MAX_VALUES,
            f"more than {_MAX_VALUES} values after expanding aliases",
            event,
        )
        self._check_node(node, event)
        self._sizes[id(node)] = self._num_values - num_before
        return node

    def _check_node(self, node: yaml.Node, event: Any) -> None:
        tag = node.tag.removeprefix(_TAG)
        self._refuse_if(
            tag not in _TAGS[type(node)],
            f"the tag {shorten(node.tag.replace(_TAG, '!!'))} is not allowed here; leave it out",
            event,
        )
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Refuse keys that are not scalars and duplicate keys; read all keys as text."""
        seen: set[str] = set()
        for key, _ in node.value:
            self._refuse_if(not isinstance(key, yaml.ScalarNode), "a key must be one word", key)
            self._refuse_if(key.value in seen, f"the key {shown(key.value)} is written twice", key)
            seen.add(key.value)
            if key.tag != f"{_TAG}merge":
                key.tag = f"{_TAG}str"

    def _refuse_if(self, is_wrong: bool, problem: str, at: Any) -> None:
        if is_wrong:
            raise _Refused(problem=problem, problem_mark=at.start_mark)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace ``<<`` by the keys that it merges.

        A key of the mapping overrides a merged key, and an earlier merged key overrides a later
        one (https://yaml.org/type/merge.html). PyYAML releases differ for nested merges.
        """
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag != f"{_TAG}merge":
                continue
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                is_mapping = isinstance(source, yaml.MappingNode)
                self._refuse_if(not is_mapping, "<< takes a mapping, or a list of mappings", source)
                self.flatten_mapping(source)
                for pair in source.value:
                    merged.setdefault(pair[0].value, pair)
        direct = {key.value: (key, value) for key, value in node.value if key.tag != f"{_TAG}merge"}
        node.value = list((merged | direct).values())

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        return super().construct_object(node, deep)

    def _scalar(self, node: Any) -> object:
        kind = node.tag.removeprefix(_TAG)
        is_number = kind in ("int", "float")
        try:
            if is_number and len(node.value) > _MAX_NUMBER_LENGTH:
                raise ValueError
            value: object = super().construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError):
            kinds = {"int": "whole number", "float": "number", "bool": "truth value"}
            what = f"{shown(node.value)} is not a valid {kinds.get(kind, kind)}"
            raise _Refused(problem=what, problem_mark=node.start_mark) from None
        return value


# Dates are text: no setting is a date, but a name may look like one, or like 2024-99-99.
_Loader.yaml_implicit_resolvers = {
    first: [item for item in resolvers if item[0] not in (f"{_TAG}timestamp", f"{_TAG}value")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
