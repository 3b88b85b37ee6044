"""The releases of Megatron-core that chunk graphs support. No torch here."""

from __future__ import annotations

__all__ = ["RANGE", "is_known"]

_FROM, _UP_TO = (0, 16), (0, 19)
RANGE = "0.16 to 0.19"


def is_known(release: tuple[int, int]) -> bool:
    """Return whether ``release``, (major, minor), is in the supported range."""
    return _FROM <= release <= _UP_TO
