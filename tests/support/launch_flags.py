"""Reads the graph flags of a command line for tests."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from chunkgraph.launch.flags import GraphFlags, add_flags, merge_flags, read_flags
from chunkgraph.settings import Config


def merged(config: Config, arguments: Sequence[str] = ()) -> list[str]:
    """Return the flags of a configuration, with those of a command line after them."""
    return merge_flags(config, arguments, _parsed(arguments, cuda_graph_granularity=None))


def graph_flags_of(arguments: Sequence[str]) -> GraphFlags | None:
    """Read the graph flags of a command line."""
    return read_flags(_parsed(arguments))


def _parsed(arguments: Sequence[str], **defaults: None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return parser.parse_known_args(arguments, argparse.Namespace(**defaults))[0]
