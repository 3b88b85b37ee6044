"""``chunkgraph config``: print the resolved configuration and the origin of each value."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from chunkgraph.errors import ConfigError
from chunkgraph.settings import load_with_origins
from chunkgraph.settings.page import settings_page
from chunkgraph.settings.reference import config_yaml, differences, reference_yaml
from chunkgraph.settings.schema import json_schema

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser", "run"]


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "config",
        help="print settings: all with their help, or those of a configuration",
        description="Print the resolved configuration, each setting with its help and origin. "
        "Without CONFIG, print every setting with its default. The output is YAML.",
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="YAML file, such as those in configs/"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings that replace the file's, such as train.lr=0.01",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--diff", action="store_true", help="print only what differs from the defaults"
    )
    output.add_argument(
        "--schema", action="store_true", help="print the JSON schema of configuration files"
    )
    output.add_argument(
        "--markdown", action="store_true", help="print the documentation's page of all settings"
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    if args.schema or args.markdown:
        if args.config is not None:
            name = "--schema" if args.schema else "--markdown"
            raise ConfigError(f"{name} is the same for every file; leave out CONFIG.")
        print(json.dumps(json_schema(), indent=2) if args.schema else settings_page().rstrip("\n"))
    elif args.config is None:
        if args.diff:
            raise ConfigError("--diff needs a CONFIG to compare with the defaults.")
        print(reference_yaml(), end="")
    else:
        loaded = load_with_origins(args.config, args.overrides)
        print(differences(loaded) if args.diff else config_yaml(loaded), end="")
    return 0
