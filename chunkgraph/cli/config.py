"""``chunkgraph config``: print a resolved configuration, all settings or the schema."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from chunkgraph.cli.arguments import add_config
from chunkgraph.errors import ConfigError
from chunkgraph.settings import load_config, resolved, to_yaml
from chunkgraph.settings.table import json_schema, settings_page

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser", "run"]


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
        print(json.dumps(json_schema(), indent=2))
    else:
        print(settings_page(), end="")
    return 0
