"""Reads the graph flags of a command line for tests."""

from __future__ import annotations

import argparse

from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import GraphFlags, read_flags


def flags_from(args: argparse.Namespace) -> GraphFlags | None:
    """Read the flags; raise one error for all invalid ones."""
    flags, wrong = read_flags(args)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return flags
