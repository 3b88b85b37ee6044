"""Reads the graph flags of a command line for tests."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from chunkgraph.errors import ConfigError
from chunkgraph.launch.config_flags import merge_flags
from chunkgraph.launch.flags import GraphFlags, add_flags, read_flags
from chunkgraph.settings import Config


def flags_from(args: argparse.Namespace) -> GraphFlags | None:
    """Read the flags; raise one error for all invalid ones."""
    flags, wrong = read_flags(args)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return flags


def merged(config: Config, arguments: Sequence[str] = ()) -> list[str]:
    """Return the flags of a configuration, with those of a command line after them."""
    return merge_flags(config, arguments, _parsed(arguments, cuda_graph_granularity=None))


def graph_flags_of(arguments: Sequence[str]) -> GraphFlags | None:
    """Read the graph flags of a command line."""
    return flags_from(_parsed(arguments))


def _parsed(arguments: Sequence[str], **defaults: None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return parser.parse_known_args(arguments, argparse.Namespace(**defaults))[0]
