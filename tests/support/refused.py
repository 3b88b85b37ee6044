"""Refusals of a model that consists of some settings of Megatron's config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from chunkgraph.megatron.refusals import facts_of_model
from chunkgraph.settings.rule import Rule, refusals


def refused(rules: Iterable[Rule], settings: Mapping[str, Any], **facts: Any) -> list[str]:
    """Return the refusals of these settings, in the words of a program."""
    return refusals(rules, facts_of_model(SimpleNamespace(**settings), facts))
