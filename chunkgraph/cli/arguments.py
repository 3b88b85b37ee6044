"""Arguments of the command line: numbers that can be counted with, and errors of few words."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from chunkgraph._text import shorten, shown

__all__ = ["Parser", "whole_number"]

_MAX_INT = 2**63 - 1
_MAX_MESSAGE = 1000
_LONG_WORD = re.compile(r"\S{201,}")


class Parser(argparse.ArgumentParser):
    """A parser whose errors cut long values."""

    def error(self, message: str) -> NoReturn:
        """Print usage and the message, and leave with exit code 2."""
        message = _LONG_WORD.sub(lambda found: shorten(found[0]), message)
        super().error(message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}...")


def whole_number(text: str) -> int:
    """Parse an option that is a whole number of at most 64 bits."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no whole number") from None
    if abs(value) > _MAX_INT:
        raise argparse.ArgumentTypeError(f"{shown(value)}: whole numbers end at {_MAX_INT}")
    return value
