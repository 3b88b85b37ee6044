"""Command-line arguments: configurations, JSON output, and errors that suggest a name."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from chunkgraph._outputs import is_stdout, output_file
from chunkgraph._text import did_you_mean, escape

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")
_UNKNOWN = re.compile(r"unrecognized arguments: (-[^\s=]+)")


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest name in errors."""

    def error(self, message: str) -> NoReturn:
        """Print usage and the message, and exit with code 2."""
        hint = ""
        if match := _CHOICE.search(message):
            hint = did_you_mean(match[1], re.findall(r"[\w.-]+", match[2]))
        elif match := _UNKNOWN.search(message):
            hint = did_you_mean(match[1], self._option_string_actions)
        super().error(escape(f"{message}.{hint}" if hint else message))


def add_config(parser: argparse.ArgumentParser, *, is_required: bool = False) -> None:
    """Add a configuration, and the settings that replace its own."""
    nargs = None if is_required else "?"
    what = "YAML file, such as those in configs/"
    parser.add_argument("config", nargs=nargs, metavar="CONFIG", help=what)
    what = "settings that replace the file's, such as train.lr=0.01"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=what)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option that writes the results as JSON."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=output_file("-"),
        type=output_file,
        help="write results as JSON to FILE or standard output",
    )


def prints_json(args: argparse.Namespace) -> bool:
    """Return whether standard output contains only the JSON of `add_json`."""
    return args.json is not None and is_stdout(args.json)
