"""``chunkgraph config``: print a resolved configuration, all settings or the schema."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import yaml

from chunkgraph.cli.arguments import add_config
from chunkgraph.errors import ConfigError
from chunkgraph.settings import (
    Config,
    Section,
    Setting,
    load_config,
    resolved,
    settings_of,
    to_yaml,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_HEADER = """\
# Settings

Every setting of a configuration file, as `chunkgraph config` prints it; the first value is the
default. A file holds what differs, and may extend another (`extends: base.yaml`, relative to
itself). `chunkgraph launch` takes a flag from the command line of a pretrain script, or gives it to
the script from `--config`; flags in italics are Megatron's own.

Overrides on a command line are `section.key=value`. `chunkgraph config CONFIG` prints what a file
resolves to, `chunkgraph config --schema` a JSON schema, with which an editor checks a file that
begins with `# yaml-language-server: $schema=FILE`.
"""
_COLUMNS = "setting | values | flag | meaning\n---|---|---|---"


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "config",
        help="print settings: a table of all, or those of a configuration",
        description="Print the resolved configuration as YAML. Without CONFIG, print a table of "
        "all settings in Markdown.",
    )
    add_config(parser)
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of configuration files"
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    if args.config is not None:
        if args.schema:
            raise ConfigError("--schema is the same for every file; leave out CONFIG.")
        print(to_yaml(resolved(load_config(args.config, args.overrides))), end="")
    elif args.schema:
        print(json.dumps(_schema(), indent=2))
    else:
        print(_page(), end="")
    return 0


def _page() -> str:
    """Return the documentation's page of all settings, in Markdown."""
    items = list(settings_of(Config))
    rows = "\n".join(_row(item) for item in items if "." not in item.path)
    blocks = [_HEADER, f"## Top level\n\n{_COLUMNS}\n{rows}\n"]
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            about = (kind.__doc__ or "").splitlines()[0]
            rows = "\n".join(_row(item) for item in items if item.path.startswith(f"{name}."))
            blocks.append(f"## `{name}`\n\n{about}\n\n{_COLUMNS}\n{rows}\n")
    return "\n".join(blocks)


def _row(item: Setting) -> str:
    values = ["required"]
    if not item.field.is_required():
        default = _inline(item.default)
        others = (*item.choices, *["null"][: item.is_optional]) if item.choices else ()
        values = [f"`{value}`" for value in dict.fromkeys((default, *others))]
    flag = f"`{item.flag}`" if item.flag else f"*`{item.megatron}`*" if item.megatron else ""
    meaning = item.help + (f" Needs `{item.switch}`." if item.switch else "")
    meaning = meaning.replace("|", "\\|").replace("*", "\\*")
    return f"`{item.name}` | {', '.join(values)} | {flag} | {meaning}"


def _inline(value: Any) -> str:
    """Return a default as YAML in one line."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()


def _schema() -> dict[str, Any]:
    """Return the schema of a configuration file, for editors that complete and check YAML.

    No setting is required in it, because a file that extends another may leave out any.
    """
    schema = Config.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        part.pop("required", None)
    text = "A file, relative to this one, that holds all other values."
    schema["properties"]["extends"] = {"type": "string", "description": text}
    return schema
