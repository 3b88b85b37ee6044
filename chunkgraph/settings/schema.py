"""The JSON schema of a configuration file, for editors that complete and check YAML."""

from __future__ import annotations

import math
from typing import Any

from chunkgraph.settings.reference import grouped
from chunkgraph.settings.setting import Setting

__all__ = ["json_schema"]

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema() -> dict[str, Any]:
    """Return the schema of every section and setting, with types, choices, bounds and defaults.

    No setting is required in it, because a file that extends another may leave out any.
    """
    properties: dict[str, Any] = {
        "extends": {
            "type": "string",
            "description": "A file, relative to this one, that holds all other values.",
        }
    }
    for section, about, settings in grouped():
        schemas = {item.name: _describe(item) for item in settings}
        if section:
            properties[section] = {**_object(schemas), "description": about}
        else:
            properties |= schemas
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "chunkgraph configuration",
        **_object(properties),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _describe(item: Setting) -> dict[str, Any]:
    single = _single(item)
    if item.is_list:
        single = {"type": "array", "items": single}
    if item.is_optional:
        single["type"] = [single["type"], "null"]
        if "enum" in single:
            single["enum"] = [*single["enum"], None]
    if not item.is_required:
        default = item.default
        single["default"] = list(default) if isinstance(default, tuple) else default
    return {"description": item.help, **single}


def _single(item: Setting) -> dict[str, Any]:
    if item.choices:
        return {"type": "string", "enum": list(item.choices)}
    bounds = {
        "minimum": item.bounds.minimum,
        "exclusiveMinimum": item.bounds.above,
        "maximum": item.bounds.maximum,
        "exclusiveMaximum": item.bounds.below,
    }
    schema: dict[str, Any] = {"type": _TYPES[item.kind]}
    schema |= {key: bound for key, bound in bounds.items() if math.isfinite(bound)}
    if item.bounds.multiple_of > 1:
        schema["multipleOf"] = item.bounds.multiple_of
    return schema
