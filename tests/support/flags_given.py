"""The flags of a command line, where none of them is wrong."""

from __future__ import annotations

import argparse

from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import GraphFlags, read_flags


def flags_from(args: argparse.Namespace) -> GraphFlags | None:
    """Read the flags; all that is wrong is an error."""
    flags, wrong = read_flags(args)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return flags
