"""Small pieces of text that several rooms share: suggestions, lists of names, byte counts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "format_bytes", "name_list"]

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest known name, or nothing when none is near.

    Returns:
        A string that starts with a space, such as `` Did you mean 'num_layers'?``, or ``""``.
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def name_list(names: Iterable[str]) -> str:
    """The names, sorted and separated by commas."""
    return ", ".join(sorted(names))


def format_bytes(num_bytes: float) -> str:
    """A byte count in the largest binary unit that keeps it at 1 or more: ``1.5 MiB``."""
    size = float(num_bytes)
    unit = _BYTE_UNITS[0]
    for unit in _BYTE_UNITS:
        if abs(size) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
