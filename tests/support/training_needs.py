"""What tests of Megatron, and of its pretrain scripts, need."""

from __future__ import annotations

import importlib.util
import sys

import pytest


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def _why_not() -> str:
    if sys.version_info < (3, 12):
        return "megatron.training of megatron-core 0.18 and newer needs Python 3.12"
    if not all(map(importlib.util.find_spec, ("megatron", "megatron.training"))):
        return "there is no megatron.training"
    if importlib.util.find_spec("psutil") is None:
        return "Megatron's checkpoints need psutil"
    return ""


HAS_MEGATRON = _has_megatron()
NEEDS_ENGINE = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed",
)
NEEDS_TRAINING = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-")
