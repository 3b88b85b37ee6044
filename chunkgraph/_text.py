"""Format text for messages: suggestions, values in errors, byte counts."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable

REPORT_WIDTH = 80
"""Columns of a report on the terminal."""
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(GiB|GB|MiB|MB)", re.IGNORECASE)
_SIZE_UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}
# Longest value in a message; what follows it has to stay readable.
_MAX_SHOWN = 200
_NAME_LENGTH = 80
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _MAX_SHOWN
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 20


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    """Return a question with the known name most like ``name``, whatever its case.

    Returns:
        A string that starts with a space, such as `` Did you mean 'num_layers'?``, or ``""``.
    """
    by_lower = {choice.lower(): choice for choice in known} if len(name) <= _NAME_LENGTH else {}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return f" Did you mean {by_lower[matches[0]]!r}?" if matches else ""


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: ``1 process``, ``2 processes``."""
    ending = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{ending * (number != 1)}"


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message, cut at 200 characters.

    Large, deep and self-referential values take no longer.
    """
    return shorten(_REPR.repr(value))


def escape(text: str, keep: str = "\n\t") -> str:
    r"""Return text for a terminal, with escapes such as ``\x1b`` for what it would not print."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def shorten(text: str) -> str:
    """Return the text of a user for a message: one line, escaped, and cut at 200 characters."""
    text = escape(text[: _MAX_SHOWN + 1], keep="")
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def format_bytes(num_bytes: float) -> str:
    """Return a byte count in the largest binary unit that keeps it at 1 or more: ``1.5 MiB``."""
    power = min(max(0, int(abs(num_bytes)).bit_length() - 1) // 10, len(_BYTE_UNITS) - 1)
    size = num_bytes / 2 ** (10 * power)
    return f"{size:.{1 if power else 0}f} {_BYTE_UNITS[power]}"


def parse_bytes(text: str) -> int | None:
    """Return a size such as ``80GiB`` or ``1.5 GB`` in bytes; None if it is none."""
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else int(float(match[1]) * _SIZE_UNITS[match[2].lower()])
