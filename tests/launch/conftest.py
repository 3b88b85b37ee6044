"""Skips the launcher's tests without Megatron, except those of its command line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_WITHOUT = {"test_launch_settings.py"}

if importlib.util.find_spec("megatron") is None:
    collect_ignore = [
        path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in _WITHOUT
    ]
